#!lua
-- Compare-and-append: messages of one shard onto its bus and onto their rooms' replay streams.
--
-- KEYS  1 the bus, then the room streams, then in the same order the rooms' tops
-- ARGV  1 bus length, 2 idle expiry of a room stream in seconds, 3 "1" if the bus may be started,
--       then for each room its length (0: the room has no stream),
--       then for each message: seq, offset, number of its room (1…), batch, blob, and the seq of the
--       message that it reports as redacted, else 0
-- Gives {status, last seq of the bus}; the statuses are `outbox.streams.Status`.
--
-- A room's top says where its stream stands: "<last offset> <offset with which it was begun>". It
-- is another key than the stream, so that a stream that lost its end, or that is as it was at some
-- earlier moment, does not speak for itself: replay.lua believes it only if it ends at the top, and
-- nothing of it from before its beginning. A room without a top has no stream; what is found under
-- that name goes.
--
-- What holds before and after every call:
--   * the seqs on the bus are dense from the seq at which it was started;
--   * the offsets in a room stream ascend, and are dense but for what a loss has taken;
--   * a top is that of its room as of the bus' last seq or a later one, unless the message at that
--     offset has a seq before the bus' start.
-- Only a message that is new on the bus touches its room. One that was there before found its place
-- then; were a late repetition allowed to begin an expired stream again, that stream would end at
-- an old offset, its top would agree, and a replay from it would miss all that came since.
--
-- A notice of a redaction removes the redacted entry and the room's stream in the step in which it
-- gets on the bus. From then on the content cannot come back by an append, however late: its seq is
-- below the last. Where the bus loses both, the notice follows the content once more. A top that is
-- at the notice or beyond it has its beginning there or later, so the content is not served from an
-- older state of the stream either.

local APPENDED, EMPTY, GAP, FORK = 0, 1, 2, 3

-- The last id that a stream ever had: trimmed or deleted entries count, 0 if it never had one.
-- A key of another type is not ours and would be in the way for ever.
local function last_of(key)
  local type = redis.call('TYPE', key).ok
  if type ~= 'stream' then
    if type ~= 'none' then
      redis.call('DEL', key)
    end
    return 0
  end
  local info = redis.call('XINFO', 'STREAM', key)
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      return tonumber(string.match(info[i + 1], '^%d+'))
    end
  end
end

-- Whether the stream holds another message at this id. One that is no longer there is no proof, and
-- neither is a key of another type.
local function differs(key, id, batch)
  local entry = redis.pcall('XRANGE', key, id, id)[1]
  if not entry then
    return false
  end
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == 'b' then
      return fields[i + 1] ~= batch
    end
  end
  return true
end

local function add(run, key, length, offset, batch, blob, seq)
  return run('XADD', key, 'MAXLEN', '~', length, offset .. '-0', 'b', batch, 'm', blob, 's', seq)
end

local bus = KEYS[1]
local bus_length = ARGV[1]
local idle_s = ARGV[2]
local start = ARGV[3] == '1'
local rooms = (#KEYS - 1) / 2
local tops, begun = {}, {}
local touched = {}
local last = last_of(bus)

-- MGET has nothing for a key of another type.
for room, value in ipairs(redis.call('MGET', unpack(KEYS, rooms + 2))) do
  local top, first = string.match(value or '', '^(%d+) (%d+)$')
  tops[room], begun[room] = tonumber(top), first
end

local function answer(status)
  for room in pairs(touched) do
    local top = string.format('%.0f %s', tops[room], begun[room])
    redis.call('SET', KEYS[rooms + 1 + room], top, 'EX', idle_s)
    redis.call('EXPIRE', KEYS[1 + room], idle_s)
  end
  return {status, last}
end

for i = 3 + rooms + 1, #ARGV, 6 do
  local seq, offset = ARGV[i], ARGV[i + 1]
  local room, batch, blob = tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local redacted = ARGV[i + 5]
  local number = tonumber(seq)
  if last > 0 and number <= last then
    if differs(bus, seq .. '-0', batch) then
      return answer(FORK)
    end
  else
    if number ~= last + 1 or last == 0 then
      if not start then
        return answer(last == 0 and EMPTY or GAP)
      end
      if last > 0 then
        redis.call('DEL', bus)
      end
    end
    start = false
    if redacted ~= '0' and redis.call('EXISTS', bus) == 1 then
      redis.call('XDEL', bus, redacted .. '-0')
    end

    local key = KEYS[1 + room]
    local length = ARGV[3 + room]
    local position, top = tonumber(offset), tops[room]
    if length == '0' then
      redis.call('DEL', key, KEYS[rooms + 1 + room])
    elseif top and position <= top then
      if differs(key, offset .. '-0', batch) then
        return answer(FORK)
      end
    else
      local anew = redacted ~= '0' or not top or position ~= top + 1
      if not anew and add(redis.pcall, key, length, offset, batch, blob, seq).err then
        -- The top is behind the stream (a relay of a version without tops has appended to it), or
        -- this is no stream.
        if differs(key, offset .. '-0', batch) then
          return answer(FORK)
        end
        anew = true
      end
      if anew then
        redis.call('DEL', key)
        add(redis.call, key, length, offset, batch, blob, seq)
        begun[room] = offset
      end
      tops[room] = position
      touched[room] = true
    end
    redis.call('XADD', bus, 'MAXLEN', '~', bus_length, seq .. '-0', 'b', batch, 'm', blob)
    last = number
  end
end

return answer(APPENDED)

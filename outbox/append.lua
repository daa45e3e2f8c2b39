#!lua
-- Compare-and-append: messages of one shard onto its bus and onto their rooms' replay streams.
--
-- KEYS  1 the bus, 2… the room streams
-- ARGV  1 bus length, 2 idle expiry of a room stream in seconds, 3 "1" if the bus may be started,
--       then for each room key its length (0: the room has no stream),
--       then for each message: seq, offset, number of its room (1…), batch, blob, and the seq of the
--       message that it reports as redacted, else 0
-- Gives {status, last seq of the bus}; the statuses are `outbox.streams.Status`.
--
-- What holds before and after every call:
--   * the seqs on the bus are dense from the seq at which it was started;
--   * the offsets in a room stream are dense;
--   * a room stream whose newest entry lies on or after the bus' start has every message of its
--     room up to the bus' last seq.
-- Only a message that is new on the bus touches its room stream. One that was there before found
-- its place then; were a late repetition allowed to begin an expired stream again, that stream
-- would end at an old offset and a replay from it would miss all that came since.
--
-- A notice of a redaction removes the redacted entry and the room's stream in the step in which it
-- gets on the bus. From then on the content cannot come back by an append, however late: its seq is
-- below the last. Where the bus loses both, the notice follows the content once more.

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

-- Whether the stream holds another message at this id. One that is no longer there is no proof.
local function differs(key, id, batch)
  local entry = redis.call('XRANGE', key, id, id)[1]
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

local bus = KEYS[1]
local bus_length = ARGV[1]
local idle_s = ARGV[2]
local start = ARGV[3] == '1'
local rooms = #KEYS - 1
local tops = {}
local touched = {}
local last = last_of(bus)

for i = 3 + rooms + 1, #ARGV, 6 do
  local seq, offset = ARGV[i], ARGV[i + 1]
  local room, batch, blob = tonumber(ARGV[i + 2]), ARGV[i + 3], ARGV[i + 4]
  local redacted = ARGV[i + 5]
  local number = tonumber(seq)
  if last > 0 and number <= last then
    if differs(bus, seq .. '-0', batch) then
      return {FORK, last}
    end
  else
    if number ~= last + 1 or last == 0 then
      if not start then
        return {last == 0 and EMPTY or GAP, last}
      end
      if last > 0 then
        redis.call('DEL', bus)
      end
    end
    start = false
    if redacted ~= '0' and redis.call('EXISTS', bus) == 1 then
      redis.call('XDEL', bus, redacted .. '-0')
    end

    local key = KEYS[room + 1]
    local length = ARGV[3 + room]
    local position = tonumber(offset)
    local top = tops[room]
    if not top then
      top = last_of(key)
    end
    if length == '0' then
      redis.call('DEL', key)
    elseif position <= top then
      if differs(key, offset .. '-0', batch) then
        return {FORK, last}
      end
    else
      if redacted ~= '0' or top > 0 and position ~= top + 1 then
        redis.call('DEL', key)
      end
      redis.call('XADD', key, 'MAXLEN', '~', length, offset .. '-0', 'b', batch, 'm', blob, 's', seq)
      top = position
      touched[room] = true
    end
    tops[room] = top
    redis.call('XADD', bus, 'MAXLEN', '~', bus_length, seq .. '-0', 'b', batch, 'm', blob)
    last = number
  end
end

for room in pairs(touched) do
  redis.call('EXPIRE', KEYS[room + 1], idle_s)
end
return {APPENDED, last}

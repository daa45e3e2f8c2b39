#!lua flags=no-writes
-- Where rooms of one shard stand, as of the bus' last seq: one atomic answer.
--
-- KEYS  1 the bus, then the rooms' streams, then in the same order their tops: append.lua says what
--       those are
-- Gives {last seq of the bus, last offset or false, …}. False if only the log can tell of a room, for
-- the reasons that replay.lua has; without a bus {0, false, …}. So it is for those that are left when
-- the newest entries, which must be looked at, have come to BYTES: Redis serves nobody else meanwhile.

local BYTES = 4194304

local rooms = (#KEYS - 1) / 2
local answer = {'0'}
for room = 1, rooms do
  answer[1 + room] = false
end
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then
  return answer
end
local bus = {}
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  bus[info[i]] = info[i + 1]
end
local last_id = string.match(bus['last-generated-id'], '^%d+')
local seq = tonumber(last_id)
if seq == 0 then
  return answer
end
answer[1] = last_id
-- Seqs are dense, so the number of entries ever added tells where the bus was started.
local started = seq - bus['entries-added'] + 1

local left_bytes = BYTES
-- MGET has nothing for a key of another type. Most rooms have no top: they cost no more than this.
for room, record in ipairs(redis.call('MGET', unpack(KEYS, rooms + 2))) do
  local top = string.match(record or '', '^(%d+) %d+$')
  -- A key of another type is an error, which has no first entry.
  local newest = top and left_bytes > 0
    and redis.pcall('XREVRANGE', KEYS[1 + room], '+', '-', 'COUNT', 1)[1]
  if newest and newest[1] == top .. '-0' then
    local fields = newest[2]
    for i = 1, #fields, 2 do
      left_bytes = left_bytes - #fields[i + 1]
      if fields[i] == 's' and (tonumber(fields[i + 1]) or 0) >= started then
        answer[1 + room] = top
      end
    end
  end
end
return answer

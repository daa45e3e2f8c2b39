#!lua flags=no-writes
-- A page of a room's replay stream, together with the seq for which it is true: one atomic answer.
--
-- KEYS  1 the bus, 2 the room's stream, 3 its top: append.lua says what that is
-- ARGV  1 the offset after which to read, or -1 for the newest; 2 messages at most; 3 bytes at most
-- Gives {last seq of the bus, last offset of the room, batch, blob, batch, blob, …}, offsets dense;
-- at least one message if there is one and the count allows it, however large.
-- Gives false if only the log can answer: no bus, no stream, one that does not end at its top, or
-- that does not hold what was asked, or that missed messages because the bus was started after its
-- newest entry.
--
-- A stream that lost its end and then went on has a hole inside. A page ends at it, below the last
-- offset of the room; the next one, which would begin with it, is for the log.

local function number_of(id)
  return tonumber(string.match(id, '^%d+'))
end

local function field(entry, name)
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == name then
      return fields[i + 1]
    end
  end
end

local function info_of(key)
  if redis.call('TYPE', key).ok ~= 'stream' then
    return nil
  end
  local info = redis.call('XINFO', 'STREAM', key)
  local found = {}
  for i = 1, #info, 2 do
    found[info[i]] = info[i + 1]
  end
  return found
end

local bus = info_of(KEYS[1])
local record = redis.pcall('GET', KEYS[3])
if not bus or type(record) ~= 'string' then
  return false
end
local last, beginning = string.match(record, '^(%d+) (%d+)$')
-- A key of another type is an error, which has no first entry.
local newest = redis.pcall('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local seq = number_of(bus['last-generated-id'])
if seq == 0 or not last or not newest or newest[1] ~= last .. '-0' then
  return false
end
local top, begun = tonumber(last), tonumber(beginning)
-- Seqs are dense, so the number of entries ever added tells where the bus was started.
local started = seq - bus['entries-added'] + 1
if tonumber(field(newest, 's') or 0) < started then
  return false
end

local after, limit, limit_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if after < 0 then
  after = math.max(top - limit, 0)
end
if limit > 0 and after < top and after + 1 < begun then
  return false
end
local answer = {string.format('%.0f', seq), string.format('%.0f', top)}
local bytes = 0
local taken = 0
while taken < limit and after + taken < top do
  local first = string.format('%.0f-0', after + taken + 1)
  -- In small steps, so that large messages beyond the limit of bytes are not read in vain.
  local entries = redis.call('XRANGE', KEYS[2], first, '+', 'COUNT', math.min(limit - taken, 32))
  if #entries == 0 then
    return taken > 0 and answer
  end
  for _, entry in ipairs(entries) do
    local blob = field(entry, 'm')
    if number_of(entry[1]) ~= after + taken + 1 then
      return taken > 0 and answer
    end
    bytes = bytes + #blob
    if taken > 0 and bytes > limit_bytes then
      return answer
    end
    answer[#answer + 1] = field(entry, 'b')
    answer[#answer + 1] = blob
    taken = taken + 1
  end
end
return answer

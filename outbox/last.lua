#!lua flags=no-writes
-- The last seq that a bus ever had; 0 if it is missing or was never started. (XINFO STREAM itself
-- would send the first and the last entry along.)
-- KEYS  1 the bus
if redis.call('TYPE', KEYS[1]).ok ~= 'stream' then
  return '0'
end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then
    return string.match(info[i + 1], '^%d+')
  end
end

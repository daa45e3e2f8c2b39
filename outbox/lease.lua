#!lua
-- Renews a relay and its leases, and moves them towards a fair distribution: one atomic step.
--
-- KEYS  1 leases (hash: shard -> "<relay> <expiry, ms>"), 2 relays (hash: relay -> expiry, ms)
-- ARGV  1 this relay, 2 lifetime in ms (0: give everything back and leave), 3 number of shards
-- Gives {number of live relays, shard, shard, …}: the shards that this relay holds now.
--
-- With n shards and r live relays each relay may hold n div r, and the first n mod r of them, in
-- the order of their names, one more. So every shard finds a holder, and a newcomer its share: the
-- others give back what they hold above theirs at their next renewal.

local leases, relays = KEYS[1], KEYS[2]
local me, lifetime_ms, shards = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = string.format('%.0f', now + lifetime_ms)
-- No relay has a longer lease (TIDEGATE_LEASE_S). What is beyond was written before Redis' clock was set
-- back, and must not outlive its relay by as much.
local horizon = now + 60000

local function is_valid(until_ms)
  local moment = tonumber(until_ms)
  return moment and moment > now and moment <= horizon
end

if lifetime_ms > 0 then
  redis.call('HSET', relays, me, expiry)
else
  redis.call('HDEL', relays, me)
end
local known = redis.call('HGETALL', relays)
local alive, names = {}, {}
for i = 1, #known, 2 do
  if is_valid(known[i + 1]) then
    alive[known[i]] = true
    names[#names + 1] = known[i]
  else
    redis.call('HDEL', relays, known[i])
  end
end
table.sort(names)

local share = 0
for rank, name in ipairs(names) do
  if name == me then
    share = math.floor(shards / #names) + (rank <= shards % #names and 1 or 0)
  end
end

local taken, mine = {}, {}
local written = redis.call('HGETALL', leases)
for i = 1, #written, 2 do
  local shard = tonumber(written[i])
  local holder, until_ms = string.match(written[i + 1], '^(%S+) (%d+)$')
  local valid = shard and shard < shards and holder and alive[holder] and is_valid(until_ms)
  if valid and holder ~= me then
    taken[shard] = true
  elseif valid then
    mine[#mine + 1] = shard
  else
    redis.call('HDEL', leases, written[i])
  end
end
table.sort(mine)
while #mine > share do
  redis.call('HDEL', leases, table.remove(mine))
end
for _, shard in ipairs(mine) do
  taken[shard] = true
end
for shard = 0, shards - 1 do
  if #mine < share and not taken[shard] then
    mine[#mine + 1] = shard
  end
end

local answer = {#names}
for _, shard in ipairs(mine) do
  redis.call('HSET', leases, shard, me .. ' ' .. expiry)
  answer[#answer + 1] = shard
end
if lifetime_ms > 0 then
  redis.call('PEXPIRE', leases, lifetime_ms * 10)
  redis.call('PEXPIRE', relays, lifetime_ms * 10)
end
return answer

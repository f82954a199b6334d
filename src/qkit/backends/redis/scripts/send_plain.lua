-- Add messages without priority or delay to a queue that never had another priority.
-- The messages stay in the ingress list, where blocked consumers wait. This is the hot path: without
-- the library and without TIME, because each redis.call costs as much as several lines of Lua.
-- KEYS: 1 meta, 2 ingress list, 3 arrivals, 4 ready list of priority 5, 5 due set, 6 lease set.
-- ARGV: frames.
-- Returns the position of the first; -1 if the caller has to use send; false if there is no queue.
local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'levels', 'early')
if not c[1] then return false end
if c[1] ~= 'queue' or (c[3] and c[3] ~= '5') then return -1 end
local count = #ARGV
local ahead = redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[3])
if c[2] then
  local total = ahead + redis.call('LLEN', KEYS[2]) + redis.call('ZCARD', KEYS[5])
                + redis.call('ZCARD', KEYS[6])
  if total + count > tonumber(c[2]) then return -1 end
end
if c[4] then ahead = ahead - 1 end
return math.max(0, ahead + redis.call('RPUSH', KEYS[2], unpack(ARGV)) - count)

-- Add messages without priority or delay to a queue that uses only priority 5.
-- The messages stay in the ingress list, on which consumers block. This is the hot path. It uses
-- neither the library nor TIME: loading the library takes time, and each redis.call costs as much
-- as several lines of Lua.
-- KEYS: 1 meta, 2 ingress list, 3 arrivals, 4 ready list of priority 5, 5 due set, 6 lease set,
-- 7 messages set aside.
-- ARGV: frames.
-- Returns the position of the first message, -1 if the caller must use send.lua, or false if the
-- queue does not exist.
local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'levels', 'early', 'ordered')
if not c[1] then return false end
if c[1] ~= 'queue' or (c[3] and c[3] ~= '5') then return -1 end
local count = #ARGV
local ahead = redis.call('LLEN', KEYS[4]) + redis.call('LLEN', KEYS[3])
if c[5] then ahead = ahead + redis.call('ZCARD', KEYS[7]) end
if c[2] then
  local total = ahead + redis.call('LLEN', KEYS[2]) + redis.call('ZCARD', KEYS[5])
                + redis.call('ZCARD', KEYS[6])
  if total + count > tonumber(c[2]) then return -1 end
end
if c[4] then ahead = ahead - 1 end
return math.max(0, ahead + redis.call('RPUSH', KEYS[2], unpack(ARGV)) - count)

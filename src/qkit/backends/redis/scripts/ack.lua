-- Acknowledge deliveries: remove their leases and frames.
-- KEYS: 1 lease set, 2 frames. ARGV: tokens.
-- Returns their number if all were held, else 1 or 0 for each.
local count = #ARGV
if redis.call('ZREM', KEYS[1], unpack(ARGV)) == count then
  redis.call('HDEL', KEYS[2], unpack(ARGV))
  return count
end
local done = {}
for i = 1, count do done[i] = redis.call('HDEL', KEYS[2], ARGV[i]) end
return done

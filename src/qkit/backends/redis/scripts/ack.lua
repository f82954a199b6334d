-- Ack deliveries: remove their leases and frames.
-- KEYS: 1 lease set, 2 frames by token. ARGV: tokens.
-- Returns the number of tokens if all were held. Otherwise returns a list: for each token, 1 if it
-- was held and 0 if not.
local count = #ARGV
if redis.call('ZREM', KEYS[1], unpack(ARGV)) == count then
  redis.call('HDEL', KEYS[2], unpack(ARGV))
  return count
end
local done = {}
for i = 1, count do done[i] = redis.call('HDEL', KEYS[2], ARGV[i]) end
return done

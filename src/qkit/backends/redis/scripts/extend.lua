-- Extend leases.
-- KEYS: 1 lease set. ARGV: for each lease, its token and its new end in milliseconds from now.
-- Returns a list with 1 for each token that was held and 0 for each other token.
local now, done = redis.call('TIME'), {}
local t = now[1] * 1000 + math.floor(now[2] / 1000)
for i = 1, #ARGV, 2 do
  if redis.call('ZSCORE', KEYS[1], ARGV[i]) then
    redis.call('ZADD', KEYS[1], t + tonumber(ARGV[i + 1]), ARGV[i])
    done[#done + 1] = 1
  else
    done[#done + 1] = 0
  end
end
return done

-- Release messages. Script on one part.
-- ARGV from 2: token, delay in ms and frame of each message. An empty frame means the stored frame.
-- A message that was claimed without a lease has an empty token.
-- Returns a list with 1 for each token that was held and 0 for each other token; an empty list if
-- the queue does not exist.
local config, reply = open()
local done = {}
if not config then return reply or done end
local q, t = part(config, 3), clock()
for i = 2, #ARGV, 3 do
  local tok, delay, f = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local held = tok == '' and 1 or redis.call('ZREM', q.lease, tok)
  if held == 1 then
    if f == '' then f = redis.call('HGET', q.msg, tok) end
    redis.call('HDEL', q.msg, tok)
    if delay > 0 then schedule(q, f, t + delay) else put_back(q, f, 1) end
  end
  done[#done + 1] = held
end
wake(q)
return done

-- Ack deliveries of an ordered subscription. Script on one part.
-- ARGV from 2: tokens. Returns the same as ack.lua.
local config, reply = open()
local count, done, held = #ARGV - 1, {}, {}
if not config then
  if reply then return reply end
  for i = 1, count do done[i] = 0 end
  return done
end
local q = part(config, 3)
if redis.call('ZREM', q.lease, unpack(ARGV, 2)) == count then
  redis.call('HDEL', q.msg, unpack(ARGV, 2))
  for i = 1, count do held[i] = ARGV[i + 1] end
  done = count
else
  for i = 1, count do
    done[i] = redis.call('HDEL', q.msg, ARGV[i + 1])
    if done[i] == 1 then held[#held + 1] = ARGV[i + 1] end
  end
end
if unlock(q, held) then wake_ordered(q) end
return done

-- Release messages of an ordered subscription. Script on one part.
-- ARGV and the reply are the same as in release.lua, except that every token is held by a lease.
-- A message without a delay returns to its old place among the messages of its key.
local config, reply = open()
local done = {}
if not config then return reply or done end
local q, t = part(config, 3), clock()
local settled, returned = {}, {}
for i = 2, #ARGV, 3 do
  local tok, delay, f = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local held = redis.call('ZREM', q.lease, tok)
  if held == 1 then
    if f == '' then f = redis.call('HGET', q.msg, tok) end
    redis.call('HDEL', q.msg, tok)
    local _, place, name = parse_token(tok)
    settled[#settled + 1] = tok
    if delay > 0 then
      schedule(q, f, t + delay)
    elseif name then
      put_aside(q, name, place, f)
      returned[name] = true
    else
      put_back(q, f, 1)
    end
  end
  done[#done + 1] = held
end
unlock(q, settled, returned)
wake_ordered(q)
return done

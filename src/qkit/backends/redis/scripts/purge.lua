-- Delete every message that no consumer holds. Script on a whole queue; no own arguments.
-- Returns their number.
local config, reply = open_whole()
if not config then return reply end
local gone = 0
redis.call('HDEL', KEYS[1], 'early')
for _, q in ipairs(parts(config, clock())) do
  for _, list in ipairs({q.arrived, q.ingress}) do
    gone = gone + redis.call('LLEN', list)
    redis.call('UNLINK', list)
  end
  for _, p in ipairs(q.levels) do
    gone = gone + redis.call('LLEN', ready(q, p))
    redis.call('UNLINK', ready(q, p))
  end
  while true do
    local toks = redis.call('ZRANGE', q.due, 0, CHUNK - 1)
    if #toks == 0 then break end
    gone = gone + #toks
    redis.call('HDEL', q.msg, unpack(toks))
    redis.call('ZREM', q.due, unpack(toks))
  end
end
return gone

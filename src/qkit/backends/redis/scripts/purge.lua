-- Delete every message that is not in flight. Script on a whole queue; no own arguments.
-- Returns the number of deleted messages; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
local deleted = 0
redis.call('HDEL', KEYS[1], 'early')
for _, q in ipairs(parts(config, clock())) do
  for _, list in ipairs({q.arrived, q.ingress}) do
    deleted = deleted + redis.call('LLEN', list)
    redis.call('UNLINK', list)
  end
  for _, p in ipairs(q.levels) do
    deleted = deleted + redis.call('LLEN', ready(q, p))
    redis.call('UNLINK', ready(q, p))
  end
  for _, set in ipairs({q.due, q.back}) do
    while true do
      local toks = redis.call('ZRANGE', set, 0, CHUNK - 1)
      if #toks == 0 then break end
      deleted = deleted + #toks
      redis.call('HDEL', q.msg, unpack(toks))
      redis.call('ZREM', set, unpack(toks))
    end
  end
  redis.call('UNLINK', q.free)
end
return deleted

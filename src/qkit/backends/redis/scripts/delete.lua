-- Delete a queue or topic with all its messages. Script on a whole queue; no own arguments.
-- Returns 1; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
for _, q in ipairs(parts(config, clock())) do
  redis.call('UNLINK', q.arrived, q.ingress, q.due, q.lease, q.msg, q.keys, q.back, q.free)
  for _, p in ipairs(q.levels) do redis.call('UNLINK', ready(q, p)) end
end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
return 1

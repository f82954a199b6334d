-- Count messages. Script on a whole queue; no own arguments.
-- Returns the numbers of ready, in-flight and scheduled messages; false if the queue does not exist.
-- Messages that were set aside for an ordered subscription count as ready.
local config, reply = open_whole()
if not config then return reply end
local t, waiting, held, scheduled = clock(), 0, 0, 0
for _, q in ipairs(parts(config, t)) do
  enqueue_arrivals(q, t)
  wake(q)
  for _, p in ipairs(q.levels) do waiting = waiting + redis.call('LLEN', ready(q, p)) end
  waiting = waiting + redis.call('LLEN', q.ingress) + redis.call('ZCARD', q.back)
  held = held + redis.call('ZCARD', q.lease)
  scheduled = scheduled + redis.call('ZCARD', q.due)
end
return {waiting, held, scheduled}

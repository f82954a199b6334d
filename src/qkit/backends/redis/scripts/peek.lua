-- Read messages in delivery order without claiming them. Script on a whole queue.
-- Own argument: the maximum number of messages.
-- Returns the group (or '') and the frame of each message; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
local t, left, out = clock(), tonumber(ARGV[FIRST]), {}
local function add(q, fs)
  for _, f in ipairs(fs) do
    if f and left > 0 then
      out[#out + 1], out[#out + 2] = q.group or '', f
      left = left - 1
    end
  end
end
for _, q in ipairs(parts(config, t)) do
  enqueue_arrivals(q, t)
  wake(q)
  for i = #q.levels, 1, -1 do
    if left > 0 then add(q, redis.call('LRANGE', ready(q, q.levels[i]), 0, left - 1)) end
  end
  if left > 0 then add(q, redis.call('LRANGE', q.ingress, 0, left - 1)) end
  if left > 0 then
    local toks = redis.call('ZRANGE', q.due, 0, math.min(left, CHUNK) - 1)
    if #toks > 0 then add(q, redis.call('HMGET', q.msg, unpack(toks))) end
  end
end
return out

-- Add messages with any priority, delay or group. Script on a whole queue.
-- Own arguments: group (or ''), priority (or ''), due time in ms (or 0) and frame of each message.
-- KEYS must contain the part of each of these groups.
-- Returns two lists: the position of each message (-1 if it has none, -2 if the queue was full),
-- and the frames that were dropped because the queue was full. Returns false if the queue does not
-- exist.
local config, reply = open_whole()
if not config then return reply end
local t = clock()

local function count(q)
  enqueue_arrivals(q, t)
  q.counts, q.ahead = {}, 0
  for _, p in ipairs(q.levels) do
    q.counts[p] = redis.call('LLEN', ready(q, p))
    q.ahead = q.ahead + q.counts[p]
  end
  q.unsorted = redis.call('LLEN', q.ingress)
  q.aside = config.ordered and redis.call('ZCARD', q.back) or 0
  q.total = q.ahead + q.unsorted + q.aside + redis.call('ZCARD', q.due)
            + redis.call('ZCARD', q.lease)
  local first = redis.call('ZRANGE', q.due, 0, 0, 'WITHSCORES')
  q.next_due = tonumber(first[2]) or math.huge
  return q
end

local evicted = {}
local function evict(q)
  for _, p in ipairs(q.levels) do
    local f = redis.call('LPOP', ready(q, p))
    if f then
      q.counts[p], q.ahead, q.total = q.counts[p] - 1, q.ahead - 1, q.total - 1
      evicted[#evicted + 1] = f
      return
    end
  end
  local entry = q.aside > 0 and redis.call('ZRANGE', q.back, 0, 0)[1]
  if entry then
    evicted[#evicted + 1] = redis.call('HGET', q.msg, entry)
    redis.call('HDEL', q.msg, entry)
    redis.call('ZREM', q.back, entry)
    q.aside, q.total = q.aside - 1, q.total - 1
  end
end

local function put(q, p, at, f)
  if config.max_depth and q.total >= config.max_depth then evict(q) end
  q.total = q.total + 1
  if at > t then
    schedule(q, f, at)
    return -1
  end
  local position = q.unsorted + q.aside
  for _, level in ipairs(q.levels) do
    if level >= p then position = position + (q.counts[level] or 0) end
  end
  redis.call('RPUSH', ready(q, p), f)
  q.counts[p], q.ahead = (q.counts[p] or 0) + 1, q.ahead + 1
  return position
end

local topic = config.kind == 'topic'
local all, by_name = {}, {}
for i, q in ipairs(parts(config, t)) do
  all[i] = count(q)
  if topic then by_name[q.group] = q end
end
local results = {}
for i = FIRST, #ARGV, 4 do
  local targets, g = all, ARGV[i]
  if topic and g ~= '' then
    if not by_name[g] then
      redis.call('SADD', KEYS[3], g)
      by_name[g] = count(config.passed[g])
      all[#all + 1] = by_name[g]
    end
    targets = {by_name[g]}
  end
  local accepted = true
  for _, q in ipairs(targets) do
    if config.max_depth and q.total >= config.max_depth and not config.drop_oldest then
      accepted = false
    end
  end
  local result = accepted and -1 or -2
  if accepted then
    for _, q in ipairs(targets) do
      result = put(q, level(q, ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3])
    end
    if topic then result = -1 end
  end
  results[#results + 1] = result
end
-- If a message is due earlier than every other, wake a blocked consumer, which would wait too long:
-- move the message to the ingress list. Of several that are due at that time it is the last one,
-- because it gets a new token and so comes after the others.
local function wake_for_due(q)
  if q.ahead > 0 or q.unsorted > 0 then return end
  local first = redis.call('ZRANGE', q.due, 0, 0, 'WITHSCORES')
  if #first == 0 or tonumber(first[2]) >= q.next_due then return end
  local tok = redis.call('ZREVRANGEBYSCORE', q.due, first[2], first[2], 'LIMIT', 0, 1)[1]
  redis.call('RPUSH', q.ingress, redis.call('HGET', q.msg, tok))
  redis.call('ZREM', q.due, tok)
  redis.call('HDEL', q.msg, tok)
  redis.call('HSET', KEYS[1], 'early', 1)  -- send_plain subtracts this message
end

for _, q in ipairs(all) do
  wake_for_due(q)
  wake(q)
end
return {results, evicted}

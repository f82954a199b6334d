-- Functions shared by the scripts. Script.load prepends this file to every script that uses them.
--
-- A script uses only keys that are in KEYS, as Redis Cluster requires: while a slot is migrating,
-- the server can then reject the call before the script changes anything.
--
-- A "part" is a queue, or one group of a topic. It has PART_KEYS + LEVELS keys, in this order: the
-- ingress list, the arrivals, the due set, the lease set, the frames by token, the locked keys, the
-- messages set aside, the free keys, and the ready lists of priorities 0 to LEVELS - 1 (script.py
-- describes them).
--
-- Scripts on one part (claim, release, and those for ordered subscriptions):
--   KEYS: 1 meta, 2 list with the name of the queue or topic, 3... keys of the part
--   ARGV: 1 LEVELS, then the script's own arguments from ARGV[2]
-- Scripts on a whole queue or topic (all others that use this library):
--   KEYS: 1 meta, 2 as above, 3 the set of group names, 4... the queue as a part, then each group
--   ARGV: 1 LEVELS, 2 number of groups, 3... their names, then the script's own arguments from
--   ARGV[FIRST]
--
-- The number of keys depends on the queue's highest priority and the topic's groups. The caller
-- passes the keys that it knows. If some are missing, the script changes nothing and returns
-- 'keys'; the caller then reads the declaration and the groups, and repeats the call.

local CHUNK = 1000  -- maximum number of values for unpack, and of messages moved per step
local PART_KEYS = 8  -- keys of a part before its ready lists
local LEVELS = tonumber(ARGV[1])
local FIRST = 3 + (tonumber(ARGV[2]) or 0)

local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function part(config, first, group)
  return {ingress = KEYS[first], arrived = KEYS[first + 1], due = KEYS[first + 2],
          lease = KEYS[first + 3], msg = KEYS[first + 4], keys = KEYS[first + 5],
          back = KEYS[first + 6], free = KEYS[first + 7], p0 = first + PART_KEYS,
          config = config, levels = config.levels, group = group}
end

local function ready(q, p) return KEYS[q.p0 + p] end

-- Returns the declaration, or nil and the reply that the script must return.
local function open()
  local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'drop_oldest', 'max_priority',
                       'levels', 'ordered')
  if not c[1] then return nil, false end
  local config = {kind = c[1], max_depth = tonumber(c[2] or ''), drop_oldest = c[3] == '1',
                  top = tonumber(c[4] or '') or 9, levels = {}, used = {}, ordered = c[6]}
  local highest = config.top
  for p in string.gmatch(c[5] or '', '%d+') do
    p = tonumber(p)
    config.levels[#config.levels + 1] = p
    config.used[p] = true
    highest = math.max(highest, p)
  end
  if highest >= LEVELS then return nil, 'keys' end
  return config
end

-- The same as open, for scripts on a whole queue or topic. config.parts lists the queue's one part,
-- or the topic's groups sorted by name; config.passed maps the name of each group in KEYS to its
-- part.
local function open_whole()
  local config, reply = open()
  if not config then return nil, reply end
  if config.kind == 'queue' then
    config.parts = {part(config, 4)}
    return config
  end
  local size = PART_KEYS + LEVELS
  config.parts, config.passed = {}, {}
  for i = 1, FIRST - 3 do
    config.passed[ARGV[2 + i]] = part(config, 4 + i * size, ARGV[2 + i])
  end
  local names = redis.call('SMEMBERS', KEYS[3])
  table.sort(names)
  for i, g in ipairs(names) do
    if not config.passed[g] then return nil, 'keys' end
    config.parts[i] = config.passed[g]
  end
  return config
end

-- Returns the id, priority, due time and delivery count of a frame; nil, '-', 0, 0 for a foreign
-- message.
local function head(f)
  local id, p, at, ex, n = string.match(f, '^qk1 (%S+) (%S+) (%d+) (%d+) (%d+)!? [-=]%S*\n[^\n]*\n')
  local read = id and #at <= 15 and #ex <= 15 and #n <= 9  -- the same limits as in codec.py
  read = read and (p == '-' or #p <= 9 and string.match(p, '^%d+$'))
  if not read then return nil, '-', 0, 0 end
  return id, p, tonumber(at), tonumber(n)
end

-- Returns the priority as a number within the queue's range, and adds it to the priorities in use.
-- The meta key lists the priorities in use, so that scripts can skip the ready lists of all others.
-- Most queues use only one priority.
local function level(q, p)
  local config = q.config
  p = math.max(0, math.min(tonumber(p) or 5, config.top))
  if not config.used[p] then
    config.used[p] = true
    table.insert(config.levels, p)
    table.sort(config.levels)
    redis.call('HSET', KEYS[1], 'levels', table.concat(config.levels, ','))
  end
  return p
end

-- Tokens have a fixed length, so that entries with equal times are in the order of their tokens.
local function format_token(number) return string.format('%012.0f', number) end
local function next_token() return format_token(redis.call('HINCRBY', KEYS[1], 'seq', 1)) end

local function schedule(q, f, at)
  local tok = next_token()
  redis.call('HSET', q.msg, tok, f)
  redis.call('ZADD', q.due, at, tok)
end

-- Returns a foreign message as a frame with a new, permanent id.
local function add_id(f, t)
  return string.format('qk1 foreign-%.0f-%s - 0 0 0 -\n\n', t, next_token()) .. f
end

-- Add each frame to the ready list of its priority, or to the due set if it is delayed.
local function enqueue(q, fs, t)
  local batches = {}
  for _, f in ipairs(fs) do
    local id, p, at = head(f)
    if not id then f = add_id(f, t) end
    if at > t then
      schedule(q, f, at)
      redis.call('HDEL', KEYS[1], 'early')
    else
      p = level(q, p)
      local batch = batches[p] or {}
      batch[#batch + 1], batches[p] = f, batch
    end
  end
  for p, batch in pairs(batches) do redis.call('RPUSH', ready(q, p), unpack(batch)) end
end

-- Enqueue up to CHUNK messages each from the arrivals and the ingress list.
local function enqueue_arrivals(q, t)
  for _, list in ipairs({q.arrived, q.ingress}) do
    local fs = redis.call('LPOP', list, CHUNK)
    if fs then enqueue(q, fs, t) end
  end
end

-- Maintain the invariant that the ingress list is not empty while any message is ready. The arrivals
-- are enqueued first: they are later than the ready messages, one of which is moved behind them.
local function wake(q)
  if redis.call('LLEN', q.ingress) > 0 then return end
  local fs = redis.call('LPOP', q.arrived, CHUNK)
  if fs then enqueue(q, fs, clock()) end
  for _, p in ipairs(q.levels) do
    local f = redis.call('RPOP', ready(q, p))
    if f then redis.call('RPUSH', q.ingress, f) return end
  end
end

-- Put a message back: at the front of its ready list if n, its delivery count, is positive; else at
-- the end.
local function put_back(q, f, n)
  local _, p = head(f)
  redis.call(n > 0 and 'LPUSH' or 'RPUSH', ready(q, level(q, p)), f)
end

-- Milliseconds until the next message is due or the next lease expires; -1 if there is none.
local function until_next(q, t)
  local nearest = -1
  for _, key in ipairs({q.due, q.lease}) do
    local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if #first > 0 then
      local wait = math.max(1, tonumber(first[2]) - t)
      if nearest < 0 or wait < nearest then nearest = wait end
    end
  end
  return nearest
end

-- Move due messages to the ready lists, in the order of their due times: messages that were delivered
-- before to the front, others to the end.
local function promote(q, t)
  local toks = redis.call('ZRANGEBYSCORE', q.due, '-inf', t, 'LIMIT', 0, CHUNK)
  if #toks == 0 then return end
  local again = {}
  for _, f in ipairs(redis.call('HMGET', q.msg, unpack(toks))) do
    if f then
      local _, _, _, n = head(f)
      if n > 0 then again[#again + 1] = f else put_back(q, f, 0) end
    end
  end
  for i = #again, 1, -1 do put_back(q, again[i], 1) end
  redis.call('ZREM', q.due, unpack(toks))
  redis.call('HDEL', q.msg, unpack(toks))
end

-- Returns a frame whose delivery count is one higher. Earlier versions wrote '!' after the delivery
-- count of the last allowed delivery; it is removed.
local function charged(f)
  local _, _, _, n = head(f)
  return (string.gsub(f, '^(qk1 %S+ %S+ %d+ %d+ )%d+!?', '%1' .. n + 1, 1))
end

-- Put messages whose leases have expired back to the front, and count the delivery.
local function put_back_expired(q, toks)
  if #toks == 0 then return end
  local fs = redis.call('HMGET', q.msg, unpack(toks))
  for i = #toks, 1, -1 do
    if fs[i] then put_back(q, charged(fs[i]), 1) end
  end
  redis.call('ZREM', q.lease, unpack(toks))
  redis.call('HDEL', q.msg, unpack(toks))
end

-- Copy messages that another program pushed to the topic's ingress list to each group. All copies
-- of a message have the same id.
local function distribute(config, t)
  local fs = redis.call('LPOP', KEYS[2], CHUNK)
  if not fs then return end
  for i, f in ipairs(fs) do if not head(f) then fs[i] = add_id(f, t) end end
  for _, q in ipairs(config.parts) do
    enqueue(q, fs, t)
    wake(q)
  end
end

-- Returns the parts of the queue or topic, after distributing the messages of a topic.
local function parts(config, t)
  if config.kind == 'topic' then distribute(config, t) end
  return config.parts
end

-- Claim messages. Script on one part.
-- ARGV: 2 maximum number of messages, 3 lease in ms (0: no lease, the messages are removed),
-- 4 '1' if the caller has just run distribute.
-- Returns a pair: 0 and a list of alternating tokens and frames; or, if no message is ready, ms
-- until the next message is due or the next lease expires (-1: none) and an empty list. Returns
-- false if the queue does not exist, 'distribute' if the caller must run distribute first, which
-- needs the keys of all groups, and 'ordered' if the caller must use claim_ordered.lua.
local config, reply = open()
if not config then return reply end
if config.ordered then return 'ordered' end
if config.kind == 'topic' and ARGV[4] ~= '1' and redis.call('LLEN', KEYS[2]) > 0 then
  return 'distribute'
end
local q, t, want = part(config, 3), clock(), tonumber(ARGV[2])
put_back_expired(q, redis.call('ZRANGEBYSCORE', q.lease, '-inf', t, 'LIMIT', 0, CHUNK))
promote(q, t)
local taken = {}
local function take(list)
  local fs = #taken < want and redis.call('LPOP', list, want - #taken)
  if fs then for _, f in ipairs(fs) do taken[#taken + 1] = f end end
end

-- Fast path for a queue that uses only priority 5: its messages are already in order, so they are
-- taken directly. A message with another priority or a delay is enqueued instead.
-- Returns true if no message had to be enqueued.
local function take_in_order()
  take(ready(q, 5))
  local enqueued = #taken
  take(q.arrived)
  take(q.ingress)
  local last = enqueued
  for i = enqueued + 1, #taken do
    local f, skip = taken[i], false
    if not string.find(f, '^qk1 %w+ %- 0 0 %d+ %-\n\n') then  -- most frames match
      local id, p, at = head(f)
      skip = at > t or (p ~= '-' and p ~= '5')
      if not id then f = add_id(f, t) end
    end
    if skip then
      enqueue(q, {f}, t)
    else
      last = last + 1
      taken[last] = f
    end
  end
  local all = last == #taken
  for i = #taken, last + 1, -1 do taken[i] = nil end
  return all
end

local one = #q.levels == 0 or (#q.levels == 1 and q.levels[1] == 5)
local plain = one and take_in_order()
if not plain and #taken == 0 then
  enqueue_arrivals(q, t)
  for i = #q.levels, 1, -1 do take(ready(q, q.levels[i])) end
end
local out, leases = {}, {}
if #taken > 0 then
  local till, last = t + tonumber(ARGV[3]), redis.call('HINCRBY', KEYS[1], 'seq', #taken)
  for i, f in ipairs(taken) do
    local tok, j = format_token(last - #taken + i), #taken - i + 1
    out[2 * i - 1], out[2 * i] = tok, f
    leases[2 * j - 1], leases[2 * j] = till, tok  -- in reverse: faster for a small sorted set
  end
  if till > t then
    redis.call('HSET', q.msg, unpack(out))
    redis.call('ZADD', q.lease, unpack(leases))
  end
end
if not plain or #taken >= want then wake(q) end  -- otherwise no message is ready
if #taken > 0 then return {0, out} end
return {until_next(q, t), out}

"""The life of a message on the server, each step one script: sent, claimed, settled."""

from __future__ import annotations

from typing import Final

from qkit.backends.redis.scripts.script import Script

__all__ = ["ACK", "CLAIM", "DECLARE", "EXTEND", "JOIN", "PLAIN", "RELEASE", "SEND"]

# ARGV: base, kind, 1 to leave what exists as it is, default dead-letter queue (or ''), then fields
# and values. What is set, the last declaration sets; a default applies where nothing was set.
# Without a kind: whatever there is, also a plain list that another program made; false if nothing.
DECLARE: Final = Script(
    r"""
local kind = redis.call('HGET', KEYS[1], 'kind')
local wanted = ARGV[2] or (redis.call('LLEN', KEYS[2]) > 0 and 'queue')
if kind and kind ~= wanted then return kind end
if not wanted then return false end
if kind and ARGV[3] == '1' then return kind end
redis.call('HSET', KEYS[1], 'kind', wanted)
-- Tokens count on from the time of the first declaration in microseconds, so that a queue that was
-- deleted and made again never names what an old consumer still holds.
local t = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'seq', string.format('%.0f', t[1] * 1000000 + t[2]))
if ARGV[4] and ARGV[4] ~= '' then redis.call('HSETNX', KEYS[1], 'dead_letter', ARGV[4]) end
for i = 5, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return wanted
""",
    library=False,
)

# ARGV: base, a group's name. What was there before is for the groups that were there.
# Returns the kind, and how many deliveries may fail; false if there is no such queue.
JOIN: Final = Script(r"""
local config = declared()
if not config then return false end
if config.kind == 'topic' then
  fan(config, clock())
  redis.call('SADD', ARGV[1] .. ':groups', ARGV[2])
end
return {config.kind, config.max_deliveries}
""")

# ARGV: base, then group (or ''), priority (or ''), due (or 0) and frame of each message.
# Returns for each its position, -1 if it has none, -2 if there was no room; then what that cost.
SEND: Final = Script(r"""
local config = declared()
if not config then return false end
local t = clock()

local function open(q)
  tidy(q, t)
  q.counts, q.ahead = {}, 0
  for _, p in ipairs(q.levels) do
    q.counts[p] = redis.call('LLEN', q.ready .. p)
    q.ahead = q.ahead + q.counts[p]
  end
  q.unfiled = redis.call('LLEN', q.ingress)
  q.total = q.ahead + q.unfiled + redis.call('ZCARD', q.due) + redis.call('ZCARD', q.lease)
  return q
end

local evicted = {}
local function evict(q)
  for _, p in ipairs(q.levels) do
    local f = redis.call('LPOP', q.ready .. p)
    if f then
      q.counts[p], q.ahead, q.total = q.counts[p] - 1, q.ahead - 1, q.total - 1
      evicted[#evicted + 1] = f
      return
    end
  end
end

local function put(q, p, at, f)
  if config.max_depth and q.total >= config.max_depth then evict(q) end
  q.total = q.total + 1
  if at > t then
    -- Who is parked does not know of it: the first one wakes somebody, who then waits for it.
    if q.ahead == 0 and q.unfiled == 0 and not q.woken then
      local first = redis.call('ZRANGE', q.due, 0, 0, 'WITHSCORES')
      if #first == 0 or tonumber(first[2]) > at then
        redis.call('RPUSH', q.ingress, f)
        redis.call('HSET', KEYS[1], 'early', 1)  -- it stands there, and is before nobody
        q.woken = true
        return -1
      end
    end
    schedule(q, f, at)
    return -1
  end
  local position = q.unfiled
  for _, level in ipairs(q.levels) do
    if level >= p then position = position + (q.counts[level] or 0) end
  end
  redis.call('RPUSH', q.ready .. p, f)
  q.counts[p], q.ahead = (q.counts[p] or 0) + 1, q.ahead + 1
  return position
end

local topic = config.kind == 'topic'
local all, named = {}, {}
for i, q in ipairs(parts(config, t)) do
  all[i] = open(q)
  if q.group then named[q.group] = q end
end
local results = {}
for i = 2, #ARGV, 4 do
  local targets, g = all, ARGV[i]
  if topic and g ~= '' then
    if not named[g] then
      redis.call('SADD', ARGV[1] .. ':groups', g)
      local base = ARGV[1] .. ':g.' .. g
      named[g] = open(queue(config, base, base))
      all[#all + 1] = named[g]
    end
    targets = {named[g]}
  end
  local room = true
  for _, q in ipairs(targets) do
    if config.max_depth and q.total >= config.max_depth and not config.drop_oldest then
      room = false
    end
  end
  local result = room and -1 or -2
  if room then
    for _, q in ipairs(targets) do
      result = put(q, level(q, ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3])
    end
    if topic then result = -1 end
  end
  results[#results + 1] = result
end
for _, q in ipairs(all) do wake(q) end
return {results, evicted}
""")

# The short way of messages without priority or delay, in a queue that never saw another priority.
# Nothing is filed: what stands in the ingress list wakes whoever waits there. Every call inside a
# script costs as much as half a dozen lines of it, so this one has no library and asks for no time.
# ARGV: base, then frames. Returns the first one's position; -1: it takes the long way, by SEND.
PLAIN: Final = Script(
    r"""
local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'levels', 'early')
if not c[1] then return false end
if c[1] ~= 'queue' or (c[3] and c[3] ~= '5') then return -1 end
local base, count = ARGV[1], #ARGV - 1
local ahead = redis.call('LLEN', base .. ':p5') + redis.call('LLEN', base .. ':in')
if c[2] then
  local total = ahead + redis.call('LLEN', KEYS[2]) + redis.call('ZCARD', base .. ':due')
                + redis.call('ZCARD', base .. ':lease')
  if total + count > tonumber(c[2]) then return -1 end
end
if c[4] then ahead = ahead - 1 end
return math.max(0, ahead + redis.call('RPUSH', KEYS[2], unpack(ARGV, 2)) - count)
""",
    library=False,
)

# ARGV: base, how many, lease in ms (0: none, they are gone from here). Returns the time now, ms to
# whatever is due next (-1: nothing), then tokens and frames; false if there is no such queue.
CLAIM: Final = Script(r"""
local config = declared()
if not config then return false end
local q, t, want = queue(config, ARGV[1], KEYS[2]), clock(), tonumber(ARGV[2])
if config.kind == 'topic' then fan(config, t) end
expire(q, t, config.max_deliveries)
promote(q, t)
local taken = {}
local function take(list)
  local fs = #taken < want and redis.call('LPOP', list, want - #taken)
  if fs then for _, f in ipairs(fs) do taken[#taken + 1] = f end end
end

-- With one priority there is nothing to sort: all stand in line already, and none need be filed.
-- Returns whether that was so; what has another priority, or waits for its time, was set aside.
local function take_in_line()
  take(q.ready .. 5)
  local filed = #taken
  take(q.arrived)
  take(q.ingress)
  local last = filed
  for i = filed + 1, #taken do
    local f, aside = taken[i], false
    if not string.find(f, '^qk1 %w+ %- 0 0 %d+ %-\n\n') then  -- as nearly all begin
      local id, p, at = head(f)
      aside = at > t or (p ~= '-' and p ~= '5')
      if not id then f = named(f, t) end
    end
    if aside then
      file(q, {f}, t)
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
local plain = one and take_in_line()
if not plain and #taken == 0 then
  tidy(q, t)
  for i = #q.levels, 1, -1 do take(q.ready .. q.levels[i]) end
end
local out, leases = {}, {}
if #taken > 0 then
  local till, last = t + tonumber(ARGV[3]), redis.call('HINCRBY', KEYS[1], 'seq', #taken)
  for i, f in ipairs(taken) do
    local tok, j = name(last - #taken + i), #taken - i + 1
    out[2 * i - 1], out[2 * i] = tok, f
    leases[2 * j - 1], leases[2 * j] = till, tok  -- backwards: a small set looks from its front
  end
  if till > t then
    redis.call('HSET', q.msg, unpack(out))
    redis.call('ZADD', q.lease, unpack(leases))
  end
end
if not plain or #taken >= want then wake(q) end  -- else nothing is ready any more
if #taken > 0 then return {t, 0, out} end
local nearest = -1
for _, key in ipairs({q.due, q.lease}) do
  local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if #first > 0 then
    local wait = math.max(1, tonumber(first[2]) - t)
    if nearest < 0 or wait < nearest then nearest = wait end
  end
end
return {t, nearest, out}
""")

# ARGV: base, tokens. Returns how many there were, if all were held, else 1 or 0 for each.
ACK: Final = Script(
    r"""
local msg, count = ARGV[1] .. ':msg', #ARGV - 1
if redis.call('ZREM', ARGV[1] .. ':lease', unpack(ARGV, 2)) == count then
  redis.call('HDEL', msg, unpack(ARGV, 2))
  return count
end
local done = {}
for i = 1, count do done[i] = redis.call('HDEL', msg, ARGV[i + 1]) end
return done
""",
    library=False,
)

# ARGV: base, then token, delay in ms and frame of each; a frame of '' is the one it had. What was
# claimed without a lease has '' for its token.
RELEASE: Final = Script(r"""
local config = declared()
local done = {}
if not config then return done end
local q, t = queue(config, ARGV[1], KEYS[2]), clock()
for i = 2, #ARGV, 3 do
  local tok, delay, f = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local held = tok == '' and 1 or redis.call('ZREM', q.lease, tok)
  if held == 1 then
    if f == '' then f = redis.call('HGET', q.msg, tok) end
    redis.call('HDEL', q.msg, tok)
    if delay > 0 then schedule(q, f, t + delay) else back(q, f, 1) end
  end
  done[#done + 1] = held
end
wake(q)
return done
""")

# ARGV: base, then token and ms of each.
EXTEND: Final = Script(r"""
local lease, t, done = ARGV[1] .. ':lease', clock(), {}
for i = 2, #ARGV, 2 do
  if redis.call('ZSCORE', lease, ARGV[i]) then
    redis.call('ZADD', lease, t + tonumber(ARGV[i + 1]), ARGV[i])
    done[#done + 1] = 1
  else
    done[#done + 1] = 0
  end
end
return done
""")

"""What happens on the server, each in one step: the scripts of a list with leases.

The keys of a queue ``orders``, all in one slot of a cluster:

=========================  =========================================================
``orders``                 the ingress list: other programs push here, consumers park here
``{orders}:in``            arrivals: what a parked consumer moved, before anyone claims it
``{orders}:p0`` … ``:p9``  ready, by priority, oldest first
``{orders}:due``           tokens of what waits for its time, by that time
``{orders}:lease``         tokens of what is held, by the end of its lease
``{orders}:msg``           frames by token
``{orders}:meta``          how the queue was declared; without it there is no queue
=========================  =========================================================

A group of a topic is the same under ``{prices}:g.<group>``, with the topic's ``:meta``.

Two rules make it safe. Every message is in one of these keys at any time, for each script moves it
in one step. And whenever a message is ready the ingress list holds one (``wake``), so nobody parks
on an empty list while there is work: no wake-up can be lost, and each claim wakes the next one. The
message that stands there is the last of the lowest priority, so coming back from there it finds
its place again, before all that arrived later.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

__all__ = [
    "ACK",
    "CLAIM",
    "DECLARE",
    "DELETE",
    "EXTEND",
    "PEEK",
    "PLAIN",
    "PURGE",
    "RELEASE",
    "REMOVE",
    "SEND",
    "STATS",
    "TIDY",
    "Script",
]


class Script:
    """A script and the name under which the server keeps it."""

    __slots__ = ("sha", "source")

    def __init__(self, source: str, library: str | None = None) -> None:
        self.source = (_LIBRARY if library is None else library) + source
        self.sha = sha1(self.source.encode(), usedforsecurity=False).hexdigest()


# KEYS of every script: 1 the meta key, 2 the ingress list; ARGV[1]: what the other keys begin with.
_LIBRARY: Final = r"""
local CHUNK = 1000  -- what unpack takes, and what one call may do without holding up the server

local function clock()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function declared()
  local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'drop_oldest', 'max_deliveries',
                       'max_priority', 'levels')
  if not c[1] then return nil end
  local config = {kind = c[1], max_depth = tonumber(c[2] or ''), drop_oldest = c[3] == '1',
                  max_deliveries = tonumber(c[4] or ''), top = tonumber(c[5] or '') or 9,
                  levels = {}, used = {}}
  for p in string.gmatch(c[6] or '', '%d+') do
    config.levels[#config.levels + 1] = tonumber(p)
    config.used[tonumber(p)] = true
  end
  return config
end

local function queue(config, base, ingress)
  return {ingress = ingress, arrived = base .. ':in', ready = base .. ':p', due = base .. ':due',
          lease = base .. ':lease', msg = base .. ':msg', config = config, levels = config.levels}
end

local function head(f)
  local id, p, at, ex, n = string.match(f, '^qk1 (%S+) (%S+) (%d+) (%d+) (%d+)!? [-=]%S*\n[^\n]*\n')
  local read = id and #at <= 15 and #ex <= 15 and #n <= 9  -- as frame.py does
  read = read and (p == '-' or #p <= 9 and string.match(p, '^%d+$'))
  if not read then return nil, '-', 0, 0 end
  return id, p, tonumber(at), tonumber(n)
end

-- Most queues use one priority: the declaration notes which, so that nobody looks into the others.
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

-- Tokens are of one length, so that equal times sort by them.
local function name(number) return string.format('%012.0f', number) end
local function token() return name(redis.call('HINCRBY', KEYS[1], 'seq', 1)) end

local function schedule(q, f, at)
  local tok = token()
  redis.call('HSET', q.msg, tok, f)
  redis.call('ZADD', q.due, at, tok)
end

-- What another program wrote gets an id here, for good.
local function named(f, t)
  return string.format('qk1 foreign-%.0f-%s - 0 0 0 -\n\n', t, token()) .. f
end

-- From the ingress list to its place.
local function file(q, fs, t)
  local batches = {}
  for _, f in ipairs(fs) do
    local id, p, at = head(f)
    if not id then f = named(f, t) end
    if at > t then
      schedule(q, f, at)
    else
      p = level(q, p)
      local batch = batches[p] or {}
      batch[#batch + 1], batches[p] = f, batch
    end
  end
  for p, batch in pairs(batches) do redis.call('RPUSH', q.ready .. p, unpack(batch)) end
end

local function tidy(q, t)
  for _, list in ipairs({q.arrived, q.ingress}) do
    local fs = redis.call('LPOP', list, CHUNK)
    if fs then file(q, fs, t) end
  end
end

local function wake(q)
  if redis.call('LLEN', q.ingress) > 0 then return end
  for _, p in ipairs(q.levels) do
    local f = redis.call('RPOP', q.ready .. p)
    if f then redis.call('RPUSH', q.ingress, f) return end
  end
end

local function back(q, f, n)
  local _, p = head(f)
  redis.call(n > 0 and 'LPUSH' or 'RPUSH', q.ready .. level(q, p), f)
end

local function promote(q, t)
  local toks = redis.call('ZRANGEBYSCORE', q.due, '-inf', t, 'LIMIT', 0, CHUNK)
  if #toks == 0 then return end
  for i, f in ipairs(redis.call('HMGET', q.msg, unpack(toks))) do
    if f then local _, _, _, n = head(f) back(q, f, n) end
  end
  redis.call('ZREM', q.due, unpack(toks))
  redis.call('HDEL', q.msg, unpack(toks))
end

-- A lease that ends counts its delivery; after the last allowed one the frame is marked, and
-- whoever claims it next buries it.
local function expire(q, t, max)
  local toks = redis.call('ZRANGEBYSCORE', q.lease, '-inf', t, 'LIMIT', 0, CHUNK)
  if #toks == 0 then return end
  local fs = redis.call('HMGET', q.msg, unpack(toks))
  for i = #toks, 1, -1 do
    local f = fs[i]
    if f then
      local _, _, _, n = head(f)
      n = n + 1
      local mark = (max and n >= max) and '!' or ''
      f = string.gsub(f, '^(qk1 %S+ %S+ %d+ %d+ )%d+!?', '%1' .. n .. mark, 1)
      back(q, f, n)
    end
  end
  redis.call('ZREM', q.lease, unpack(toks))
  redis.call('HDEL', q.msg, unpack(toks))
end

local function groups()
  local found = redis.call('SMEMBERS', ARGV[1] .. ':groups')
  table.sort(found)
  return found
end

-- The queue of the call, or a topic's groups.
local function parts(config)
  if config.kind == 'queue' then return {queue(config, ARGV[1], KEYS[2])} end
  local found = {}
  for _, g in ipairs(groups()) do
    local base = ARGV[1] .. ':g.' .. g
    found[#found + 1] = queue(config, base, base)
    found[#found].group = g
  end
  return found
end
"""

# ARGV: base, kind, then fields and values. Whoever declares last says how it is from then on.
DECLARE: Final = Script(r"""
local kind = redis.call('HGET', KEYS[1], 'kind')
if kind and kind ~= ARGV[2] then return kind end
redis.call('HSET', KEYS[1], 'kind', ARGV[2])
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return ARGV[2]
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
    if q.ahead == 0 and q.unfiled == 0 then
      local first = redis.call('ZRANGE', q.due, 0, 0, 'WITHSCORES')
      if #first == 0 or tonumber(first[2]) > at then
        redis.call('RPUSH', q.ingress, f)
        q.unfiled = 1
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
for i, q in ipairs(parts(config)) do
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
local c = redis.call('HMGET', KEYS[1], 'kind', 'max_depth', 'levels')
if not c[1] then return false end
if c[1] ~= 'queue' or (c[3] and c[3] ~= '5') then return -1 end
local base, count = ARGV[1], #ARGV - 1
local ahead = redis.call('LLEN', base .. ':p5') + redis.call('LLEN', base .. ':in')
if c[2] then
  local total = ahead + redis.call('LLEN', KEYS[2]) + redis.call('ZCARD', base .. ':due')
                + redis.call('ZCARD', base .. ':lease')
  if total + count > tonumber(c[2]) then return -1 end
end
return ahead + redis.call('RPUSH', KEYS[2], unpack(ARGV, 2)) - count
""",
    library="",
)

# ARGV: base, how many, lease in ms (0: none, they are gone from here). Returns the time now, ms to
# whatever is due next (-1: nothing), then tokens and frames; false if there is no such queue.
CLAIM: Final = Script(r"""
local config = declared()
if not config then return false end
local q, t, want = queue(config, ARGV[1], KEYS[2]), clock(), tonumber(ARGV[2])
expire(q, t, config.max_deliveries)
promote(q, t)
local taken = {}
local function take(list)
  local fs = #taken < want and redis.call('LPOP', list, want - #taken)
  if fs then for _, f in ipairs(fs) do taken[#taken + 1] = f end end
end

-- With one priority there is nothing to sort: all stand in line already, and none need be filed.
-- Returns whether that was so.
local function take_in_line()
  take(q.ready .. 5)
  local filed = #taken
  take(q.arrived)
  take(q.ingress)
  local last = filed
  for i = filed + 1, #taken do
    local f = taken[i]
    local id, p, at = head(f)
    if id and (at > t or (p ~= '-' and p ~= '5')) then
      file(q, {f}, t)
    else
      last = last + 1
      taken[last] = id and f or named(f, t)
    end
  end
  local all = last == #taken
  for i = #taken, last + 1, -1 do taken[i] = nil end
  return all or last > 0
end

local one = #q.levels == 0 or (#q.levels == 1 and q.levels[1] == 5)
if not (one and take_in_line()) then
  tidy(q, t)
  for i = #q.levels, 1, -1 do take(q.ready .. q.levels[i]) end
end
local out, leases = {}, {}
if #taken > 0 then
  local till, last = t + tonumber(ARGV[3]), redis.call('HINCRBY', KEYS[1], 'seq', #taken)
  for i, f in ipairs(taken) do
    local tok = name(last - #taken + i)
    out[2 * i - 1], out[2 * i] = tok, f
    leases[2 * i - 1], leases[2 * i] = till, tok
  end
  if till > t then
    redis.call('HSET', q.msg, unpack(out))
    redis.call('ZADD', q.lease, unpack(leases))
  end
end
wake(q)
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

# ARGV: base, tokens. Returns 1 for each that was held, else 0.
ACK: Final = Script(r"""
local lease, done, held, seen = ARGV[1] .. ':lease', {}, {}, {}
for i, score in ipairs(redis.call('ZMSCORE', lease, unpack(ARGV, 2))) do
  local tok = ARGV[i + 1]
  done[i] = (score and not seen[tok]) and 1 or 0
  seen[tok] = true
  if done[i] == 1 then held[#held + 1] = tok end
end
if #held > 0 then
  redis.call('ZREM', lease, unpack(held))
  redis.call('HDEL', ARGV[1] .. ':msg', unpack(held))
end
return done
""")

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

# A consumer leaves: what it moved to the arrivals is for the others.
TIDY: Final = Script(r"""
local config = declared()
if not config then return 0 end
local q = queue(config, ARGV[1], KEYS[2])
tidy(q, clock())
wake(q)
return 1
""")

STATS: Final = Script(r"""
local config = declared()
if not config then return false end
local t, ready, held, scheduled = clock(), 0, 0, 0
for _, q in ipairs(parts(config)) do
  tidy(q, t)
  wake(q)
  for _, p in ipairs(q.levels) do ready = ready + redis.call('LLEN', q.ready .. p) end
  ready = ready + redis.call('LLEN', q.ingress)
  held = held + redis.call('ZCARD', q.lease)
  scheduled = scheduled + redis.call('ZCARD', q.due)
end
return {ready, held, scheduled}
""")

# ARGV: base, how many. Returns group and frame of each, in the order of delivery.
PEEK: Final = Script(r"""
local config = declared()
if not config then return false end
local t, left, out = clock(), tonumber(ARGV[2]), {}
local function add(q, fs)
  for _, f in ipairs(fs) do
    if f and left > 0 then
      out[#out + 1], out[#out + 2] = q.group or '', f
      left = left - 1
    end
  end
end
for _, q in ipairs(parts(config)) do
  tidy(q, t)
  wake(q)
  for i = #q.levels, 1, -1 do
    if left > 0 then add(q, redis.call('LRANGE', q.ready .. q.levels[i], 0, left - 1)) end
  end
  if left > 0 then add(q, redis.call('LRANGE', q.ingress, 0, left - 1)) end
  if left > 0 then
    local toks = redis.call('ZRANGE', q.due, 0, math.min(left, CHUNK) - 1)
    if #toks > 0 then add(q, redis.call('HMGET', q.msg, unpack(toks))) end
  end
end
return out
""")

PURGE: Final = Script(r"""
local config = declared()
if not config then return false end
local gone = 0
for _, q in ipairs(parts(config)) do
  for _, list in ipairs({q.arrived, q.ingress}) do
    gone = gone + redis.call('LLEN', list)
    redis.call('UNLINK', list)
  end
  for _, p in ipairs(q.levels) do
    gone = gone + redis.call('LLEN', q.ready .. p)
    redis.call('UNLINK', q.ready .. p)
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
""")

# ARGV: base, ids as frames have them; one that is named twice takes two.
REMOVE: Final = Script(r"""
local config = declared()
if not config then return false end
local t, gone, wanted = clock(), 0, {}
for i = 2, #ARGV do wanted[ARGV[i]] = (wanted[ARGV[i]] or 0) + 1 end
local function hit(f)
  local id = head(f)
  if not id or (wanted[id] or 0) == 0 then return false end
  wanted[id] = wanted[id] - 1
  gone = gone + 1
  return true
end
for _, q in ipairs(parts(config)) do
  tidy(q, t)
  local lists = {}
  for i = #q.levels, 1, -1 do lists[#lists + 1] = q.ready .. q.levels[i] end
  lists[#lists + 1] = q.ingress
  for _, list in ipairs(lists) do
    local at = 0
    while true do
      local fs = redis.call('LRANGE', list, at, at + CHUNK - 1)
      if #fs == 0 then break end
      at = at + #fs
      for _, f in ipairs(fs) do
        if hit(f) then
          redis.call('LREM', list, 1, f)
          at = at - 1
        end
      end
    end
  end
  for _, tok in ipairs(redis.call('ZRANGE', q.due, 0, -1)) do
    local f = redis.call('HGET', q.msg, tok)
    if f and hit(f) then
      redis.call('HDEL', q.msg, tok)
      redis.call('ZREM', q.due, tok)
    end
  end
  wake(q)
end
return gone
""")

DELETE: Final = Script(r"""
local config = declared()
if not config then return false end
for _, q in ipairs(parts(config)) do
  redis.call('UNLINK', q.arrived, q.ingress, q.due, q.lease, q.msg)
  for _, p in ipairs(q.levels) do redis.call('UNLINK', q.ready .. p) end
end
redis.call('UNLINK', KEYS[1], KEYS[2], ARGV[1] .. ':groups')
return 1
""")

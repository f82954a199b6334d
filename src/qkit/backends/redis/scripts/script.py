"""What the scripts on the server have in common: the keys of a queue, and every move between them.

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

A group of a topic is the same under ``{prices}:g.<group>``, with the topic's ``:meta``; the names
of the groups are in ``{prices}:groups``.

Two rules make it safe. Every message is in one of these keys at any time, for each script moves it
in one step. And whenever a message is ready the ingress list holds one (``wake``), so nobody parks
on an empty list while there is work: no wake-up can be lost, and each claim wakes the next one. The
message that stands there is the last of the lowest priority, so coming back from there it finds
its place again, before all that arrived later.
"""

from __future__ import annotations

from hashlib import sha1
from typing import Final

__all__ = ["Script"]


class Script:
    """A script and the name under which the server keeps it.

    Without ``library`` it has to do without the functions below, and is so much quicker.
    """

    __slots__ = ("sha", "source")

    def __init__(self, source: str, *, library: bool = True) -> None:
        self.source = (_LIBRARY if library else "") + source
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
      redis.call('HDEL', KEYS[1], 'early')
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

-- A topic's groups, each with its part of it.
local function groups(config, base)
  local names, found = redis.call('SMEMBERS', base .. ':groups'), {}
  table.sort(names)
  for i, g in ipairs(names) do
    local own = base .. ':g.' .. g
    found[i] = queue(config, own, own)
    found[i].group = g
  end
  return found
end

-- What another program pushed to a topic's own name is for each of its groups, under one id.
local function fan(config, t)
  local topic = string.sub(KEYS[1], 2, -7)  -- as in {prices}:meta
  local fs = redis.call('LPOP', topic, CHUNK)
  if not fs then return end
  for i, f in ipairs(fs) do if not head(f) then fs[i] = named(f, t) end end
  for _, q in ipairs(groups(config, '{' .. topic .. '}')) do
    file(q, fs, t)
    wake(q)
  end
end

-- The queue of the call, or a topic's groups.
local function parts(config, t)
  if config.kind == 'queue' then return {queue(config, ARGV[1], KEYS[2])} end
  fan(config, t)
  return groups(config, ARGV[1])
end
"""

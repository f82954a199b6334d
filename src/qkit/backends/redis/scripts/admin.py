"""What administration does on the server, each one script: look, empty, delete."""

from __future__ import annotations

from typing import Final

from qkit.backends.redis.scripts.script import Script

__all__ = ["DELETE", "PEEK", "PURGE", "REMOVE", "STATS"]

STATS: Final = Script(r"""
local config = declared()
if not config then return false end
local t, ready, held, scheduled = clock(), 0, 0, 0
for _, q in ipairs(parts(config, t)) do
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
for _, q in ipairs(parts(config, t)) do
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
redis.call('HDEL', KEYS[1], 'early')
for _, q in ipairs(parts(config, clock())) do
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
for _, q in ipairs(parts(config, t)) do
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
for _, q in ipairs(parts(config, clock())) do
  redis.call('UNLINK', q.arrived, q.ingress, q.due, q.lease, q.msg)
  for _, p in ipairs(q.levels) do redis.call('UNLINK', q.ready .. p) end
end
redis.call('UNLINK', KEYS[1], KEYS[2], ARGV[1] .. ':groups')
return 1
""")

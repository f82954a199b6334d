-- Claim messages of a queue that has or had ordered subscriptions. Script on one part.
-- ARGV: 2 to 4 as in claim.lua, 5 id of the ordered subscription, '' for an unordered one.
-- Returns the same as claim.lua. An ordered subscription receives messages of a key only in order
-- and while no other ordered subscription holds one; other messages are set aside, at most about
-- CHUNK per call. An unordered subscription receives everything that is not in flight.
local config, reply = open()
if not config then return reply end
if config.kind == 'topic' and ARGV[4] ~= '1' and redis.call('LLEN', KEYS[2]) > 0 then
  return 'distribute'
end
local q, t, want, me = part(config, 3), clock(), tonumber(ARGV[2]), ARGV[5]
local LOOK_AHEAD_BYTES = 4 * 2^20  -- of the messages that one step reads beyond those it can take
expire(q, t)
promote(q, t)
sweep(q, t)

local tokens, frames = {}, {}
local changed = {}  -- keys whose locks were changed
local moved, delayed = 0, false  -- messages set aside or enqueued; whether any was enqueued
local seen, bytes = 0, 0

local function take(f, number, name, place)
  local tok = format_token(number)
  if name then tok = tok .. ' ' .. me .. ' ' .. place .. ' ' .. name end
  tokens[#tokens + 1], frames[#frames + 1] = tok, f
end

-- Take messages of a key that were set aside. Returns how many, and whether more are left.
local function take_entries(name)
  local room, count = want - #tokens, 0
  local found = entries(q, name, room)
  if #found == 0 then return 0, false end
  local number = redis.call('HINCRBY', KEYS[1], 'seq', #found) - #found
  for i, f in ipairs(remove_entries(q, found)) do
    if f then
      count = count + 1
      take(f, number + i, me ~= '' and name or nil, string.match(found[i], ' (%d+)$'))
    end
  end
  return count, #found == room and #entries(q, name, 1) > 0
end

-- Take messages that were set aside and whose keys are free.
local function take_free()
  while #tokens < want do
    local name = redis.call('ZRANGE', q.free, 0, 0)[1]
    if not name then return end
    local count, more = take_entries(name)
    if me == '' or count == 0 then
      update_free(q, name)
    else
      redis.call('ZREM', q.free, name)
      locks[name], changed[name] = {owner = me, held = count, more = more}, true
    end
  end
end

-- Take messages that were set aside and whose keys this subscription holds already.
local function take_held()
  if me == '' or #tokens >= want or redis.call('ZCARD', q.back) == 0 then return end
  local all = redis.call('HGETALL', q.keys)
  for i = 1, #all, 2 do
    local name = all[i]
    local lock = locks[name] or parse_lock(all[i + 1])
    if lock.owner == me and lock.more and #tokens < want then
      local count, more = take_entries(name)
      lock.held, lock.more = lock.held + count, more
      locks[name], changed[name] = lock, true
    end
  end
end

-- Returns whether a frame is foreign, its key or nil, and whether it must be enqueued.
local function read(f, sorted)
  local key = string.match(f, '^qk1 %w+ %- 0 0 %d+ ([-=]%S*)\n[^\n]*\n')  -- most frames match
  local id, p, at = true, '-', 0
  if not key then
    id, p, at = head(f)
    key = id and string.match(f, '^%S+ %S+ %S+ %S+ %S+ %S+ ([-=]%S*)') or '-'
  end
  local waits = not sorted and (at > t or (p ~= '-' and p ~= '5'))
  return not id, key ~= '-' and me ~= '' and name_of(key) or nil, waits
end

-- Take, set aside or enqueue messages in order. Returns how many; it stops when enough are taken.
local function sort_out(fs, p, sorted)
  local names, waits, unknown = {}, {}, {}
  for i, f in ipairs(fs) do
    local foreign
    foreign, names[i], waits[i] = read(f, sorted)
    if foreign then fs[i] = add_id(f, t) end
    local name = names[i]
    if name and not locks[name] then
      locks[name] = {held = 0}
      unknown[#unknown + 1] = name
    end
    bytes = bytes + #f
  end
  seen = seen + #fs
  read_locks(q, unknown)
  local number, used, last = redis.call('HINCRBY', KEYS[1], 'seq', #fs) - #fs, #fs, 0
  local aside, back, priority = {}, {}, format_priority(p)
  for i, f in ipairs(fs) do
    if #tokens >= want then used = i - 1 break end
    local name = names[i]
    local lock = name and locks[name]
    if waits[i] then
      enqueue(q, {f}, t)
      moved, delayed = moved + 1, true
    elseif not lock then
      take(f, number + i)
    elseif not lock.owner or (lock.owner == me and not lock.more) then
      lock.owner, lock.held, changed[name] = me, lock.held + 1, true
      take(f, number + i, name, priority .. format_token(number + i))
    else
      if not lock.more then lock.more, changed[name] = true, true end
      local entry = name .. ' ' .. priority .. format_token(number + i)
      back[last + 1], back[last + 2] = 0, entry
      aside[last + 1], aside[last + 2] = entry, f
      last, moved = last + 2, moved + 1
    end
  end
  if last > 0 then
    redis.call('HSET', q.msg, unpack(aside))
    redis.call('ZADD', q.back, unpack(back))
  end
  return used
end

-- Take the messages of a list. p: their priority. sorted: whether all of them have this priority.
local function take_list(list, p, sorted)
  while #tokens < want and moved < CHUNK do
    local room = want - #tokens
    local ahead = math.min(CHUNK - moved, math.floor(LOOK_AHEAD_BYTES * seen / math.max(bytes, 1)))
    if moved == 0 or ahead <= room then
      local fs = redis.call('LPOP', list, math.min(room, CHUNK))
      if not fs then return end
      sort_out(fs, p, sorted)
    else
      local fs = redis.call('LRANGE', list, 0, ahead - 1)
      if #fs == 0 then return end
      redis.call('LTRIM', list, sort_out(fs, p, sorted), -1)
    end
  end
end

take_free()
local one = #q.levels == 0 or (#q.levels == 1 and q.levels[1] == 5)
if one then
  local p = math.min(5, config.top)
  take_list(ready(q, 5), p, true)
  take_list(q.arrived, p, false)
  take_list(q.ingress, p, false)
end
if not one or (delayed and #tokens == 0) then
  enqueue_arrivals(q, t)
  for i = #q.levels, 1, -1 do take_list(ready(q, q.levels[i]), q.levels[i], true) end
end
take_held()
write_locks(q, changed)

local out, leases, till = {}, {}, t + tonumber(ARGV[3])
for i, tok in ipairs(tokens) do
  local j = #tokens - i + 1
  out[2 * i - 1], out[2 * i] = tok, frames[i]
  leases[2 * j - 1], leases[2 * j] = till, tok
end
if #tokens > 0 and till > t then
  redis.call('HSET', q.msg, unpack(out))
  redis.call('ZADD', q.lease, unpack(leases))
end
wake_ordered(q)
if #tokens > 0 or moved >= CHUNK then return {0, out} end
return {until_next(q, t), out}

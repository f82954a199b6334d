-- Functions for queues with ordered subscriptions, used after library.lua.
--
-- While an ordered subscription holds messages of a key, the key is locked. A claim sets aside the
-- messages of keys that other subscriptions hold.
--
--   q.keys  hash, by locked key: '<subscription> <number of messages held> <more>', where more is 1
--           if q.back may contain messages of the key; also 'swept', the time of the last sweep
--   q.back  sorted set of the messages that were set aside. All scores are 0, so the entries
--           '<key> <place>' are in lexical order. Their frames are in q.msg under the same names.
--   q.free  sorted set of the keys that are not locked and have messages in q.back, oldest first
--
-- A place is the priority, highest first, and the number that the message got when it first left
-- the ready list of its priority. A message keeps it, so that it can return to its old place. The
-- token of an ordered delivery is '<number of the claim> <subscription> <place> <key>'. The locks
-- can therefore be computed from the lease set, which sweep does: a process with an earlier version
-- puts expired messages back without unlocking their keys.

local SWEEP_MS = 1000  -- minimum time between two sweeps

local locks = {}  -- the locks that this call has read, by key; {held = 0} for a key without a lock

-- Returns the name that identifies a key here. It is the key, unless that is long or not printable.
local function name_of(key)
  if locks[key] or (#key <= 128 and not string.find(key, '[^!-~]')) then return key end
  return '#' .. redis.sha1hex(key)
end

local function format_priority(p) return string.format('%09d', 999999999 - p) end

-- Returns the subscription, place and key of a token; nil for a token of an unordered delivery.
local function parse_token(tok) return string.match(tok, '^%d+ (%x+) (%d+) (.+)$') end

-- Returns up to `limit` entries of a key, in order; in reverse order if `last` is set.
local function entries(q, name, limit, last)
  local from, to = '[' .. name .. ' ', '(' .. name .. '!'
  if last then return redis.call('ZREVRANGEBYLEX', q.back, to, from, 'LIMIT', 0, limit) end
  return redis.call('ZRANGEBYLEX', q.back, from, to, 'LIMIT', 0, limit)
end

-- Removes entries and returns their frames; false for a frame that does not exist.
local function remove_entries(q, found)
  local fs = redis.call('HMGET', q.msg, unpack(found))
  redis.call('ZREM', q.back, unpack(found))
  redis.call('HDEL', q.msg, unpack(found))
  return fs
end

-- Add or remove a key without a lock from the free keys.
local function update_free(q, name)
  local first = entries(q, name, 1)[1]
  if first then
    redis.call('ZADD', q.free, string.match(first, ' %d%d%d%d%d%d%d%d%d(%d+)$'), name)
  else
    redis.call('ZREM', q.free, name)
  end
end

local function parse_lock(value)
  local owner, held, more = string.match(value or '', '^(%x+) (%d+) (%d)$')
  return {owner = owner, held = tonumber(held) or 0, more = more == '1'}
end

-- Read the locks of up to CHUNK keys.
local function read_locks(q, names)
  if #names == 0 then return end
  for i, value in ipairs(redis.call('HMGET', q.keys, unpack(names))) do
    locks[names[i]] = parse_lock(value)
  end
end

-- Write changed locks. A key of which no message is held is unlocked.
-- Returns whether q.back may have messages of an unlocked key.
local function write_locks(q, changed)
  local sets, dels, unlocked = {}, {}, {}
  for name in pairs(changed) do
    local lock = locks[name]
    if lock.held > 0 then
      sets[#sets + 1] = name
      sets[#sets + 1] = lock.owner .. ' ' .. lock.held .. (lock.more and ' 1' or ' 0')
    else
      dels[#dels + 1] = name
      if lock.more then unlocked[#unlocked + 1] = name end
      locks[name] = {held = 0}
    end
    if #sets == 2 * CHUNK then redis.call('HSET', q.keys, unpack(sets)) sets = {} end
    if #dels == CHUNK then redis.call('HDEL', q.keys, unpack(dels)) dels = {} end
  end
  if #sets > 0 then redis.call('HSET', q.keys, unpack(sets)) end
  if #dels > 0 then redis.call('HDEL', q.keys, unpack(dels)) end
  for _, name in ipairs(unlocked) do update_free(q, name) end
  return #unlocked > 0
end

-- Count deliveries as settled, and unlock the keys of which none is left.
-- returned: keys of which messages went back to q.back. Returns the same as write_locks.
local function unlock(q, toks, returned)
  local changed, names = {}, {}
  for _, tok in ipairs(toks) do
    local owner, _, name = parse_token(tok)
    if name then
      if not changed[name] then
        changed[name] = {}
        names[#names + 1] = name
      end
      changed[name][owner] = (changed[name][owner] or 0) + 1
    end
  end
  for first = 1, #names, CHUNK do
    local some = {}
    for i = first, math.min(first + CHUNK - 1, #names) do some[#some + 1] = names[i] end
    read_locks(q, some)
  end
  for name, settled in pairs(changed) do
    local lock = locks[name]
    lock.held = lock.held - (settled[lock.owner or ''] or 0)
    lock.more = lock.more or returned ~= nil and returned[name] == true
  end
  return write_locks(q, changed)
end

-- Put a message back to its old place among the messages of its key.
local function put_aside(q, name, place, f)
  local entry = name .. ' ' .. place
  redis.call('HSET', q.msg, entry, f)
  redis.call('ZADD', q.back, 0, entry)
end

-- The same as wake, also for messages that were set aside and whose keys are free. It moves the last
-- message of a key, which stays after all others of its key.
local function wake_ordered(q)
  wake(q)
  while redis.call('LLEN', q.ingress) == 0 do
    local name = redis.call('ZRANGE', q.free, 0, 0)[1]
    if not name then return end
    local last = entries(q, name, 1, true)
    local f = #last > 0 and remove_entries(q, last)[1]
    if f then redis.call('RPUSH', q.ingress, f) end
    update_free(q, name)
  end
end

-- Put back messages whose leases have expired. With a message of an ordered delivery, all messages
-- of its key that the subscription holds go back to their places. The deliveries of those that
-- expired are counted, and always that of the first one, which was being handled.
local function expire(q, t)
  local toks = redis.call('ZRANGEBYSCORE', q.lease, '-inf', t, 'LIMIT', 0, CHUNK)
  local unordered, expired, lost, any = {}, {}, {}, false
  for _, tok in ipairs(toks) do
    local owner, _, name = parse_token(tok)
    if name then
      expired[tok], lost[owner .. ' ' .. name], any = true, {}, true
    else
      unordered[#unordered + 1] = tok
    end
  end
  put_back_expired(q, unordered)
  if not any then return end
  local gone, returned = {}, {}
  for _, tok in ipairs(redis.call('ZRANGE', q.lease, 0, -1)) do
    local owner, place, name = parse_token(tok)
    local held = name and lost[owner .. ' ' .. name]
    if held then
      gone[#gone + 1], returned[name] = tok, true
      if not held.place or place < held.place then held.place, held.first = place, tok end
    end
  end
  for _, tok in ipairs(gone) do
    local owner, place, name = parse_token(tok)
    local f = redis.call('HGET', q.msg, tok)
    if f then
      local first = lost[owner .. ' ' .. name].first == tok
      put_aside(q, name, place, (expired[tok] or first) and charged(f) or f)
    end
    redis.call('ZREM', q.lease, tok)
    redis.call('HDEL', q.msg, tok)
  end
  unlock(q, gone, returned)
end

-- Correct the locks, at most once per SWEEP_MS and only while messages are set aside.
local function sweep(q, t)
  if redis.call('ZCARD', q.back) == 0 then return end
  local since = t - (tonumber(redis.call('HGET', q.keys, 'swept')) or 0)
  if since >= 0 and since < SWEEP_MS then return end
  local held = {}
  for _, tok in ipairs(redis.call('ZRANGE', q.lease, 0, -1)) do
    local owner, _, name = parse_token(tok)
    if name then
      local id = owner .. ' ' .. name
      held[id] = (held[id] or 0) + 1
    end
  end
  local all, changed = redis.call('HGETALL', q.keys), {}
  for i = 1, #all, 2 do
    local name, lock = all[i], parse_lock(all[i + 1])
    if lock.owner then
      local right = held[lock.owner .. ' ' .. name] or 0
      if right ~= lock.held then
        lock.held, lock.more = right, true
        locks[name], changed[name] = lock, true
      end
    end
  end
  write_locks(q, changed)
  redis.call('HSET', q.keys, 'swept', string.format('%.0f', t))
end

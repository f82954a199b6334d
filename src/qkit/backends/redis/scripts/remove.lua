-- Delete messages that are not in flight, by id. Script on a whole queue.
-- Own arguments: ids as written in frames. An id that is given twice deletes two messages.
-- Returns the number of deleted messages; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
local t, deleted, wanted = clock(), 0, {}
for i = FIRST, #ARGV do wanted[ARGV[i]] = (wanted[ARGV[i]] or 0) + 1 end
local function hit(f)
  local id = head(f)
  if not id or (wanted[id] or 0) == 0 then return false end
  wanted[id] = wanted[id] - 1
  deleted = deleted + 1
  return true
end
for _, q in ipairs(parts(config, t)) do
  enqueue_arrivals(q, t)
  local lists = {}
  for i = #q.levels, 1, -1 do lists[#lists + 1] = ready(q, q.levels[i]) end
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
  for _, set in ipairs({q.back, q.due}) do
    for _, tok in ipairs(redis.call('ZRANGE', set, 0, -1)) do
      local f = redis.call('HGET', q.msg, tok)
      if f and hit(f) then
        redis.call('HDEL', q.msg, tok)
        redis.call('ZREM', set, tok)
      end
    end
  end
  wake_ordered(q)
end
return deleted

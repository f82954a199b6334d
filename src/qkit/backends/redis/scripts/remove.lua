-- Delete messages by id. Script on a whole queue.
-- Own arguments: ids as frames have them; an id that occurs twice deletes two messages.
-- Returns how many were deleted.
local config, reply = open_whole()
if not config then return reply end
local t, gone, wanted = clock(), 0, {}
for i = FIRST, #ARGV do wanted[ARGV[i]] = (wanted[ARGV[i]] or 0) + 1 end
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

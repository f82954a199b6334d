-- Return messages that were set aside and whose keys are free to the ready lists, at most CHUNK, so
-- that consumers of earlier versions and other programs find them. Script on one part.
-- The last messages of a key go first, so that the order of the key holds between two calls.
-- Returns 1 if more may be left, else 0.
local STEP, MAX_BYTES = 100, 4 * 2^20
local config, reply = open()
if not config then return reply or 0 end
local q, bytes, found = part(config, 3), 0, {}
while #found < CHUNK and bytes < MAX_BYTES do
  local name = redis.call('ZRANGE', q.free, -1, -1)[1]
  if not name then break end
  local last = entries(q, name, STEP, true)
  if #last > 0 then
    for i, f in ipairs(remove_entries(q, last)) do
      if f then
        found[#found + 1] = {place = string.match(last[i], ' %d%d%d%d%d%d%d%d%d(%d+)$'), f = f}
        bytes = bytes + #f
      end
    end
  end
  update_free(q, name)
end
table.sort(found, function(a, b) return a.place > b.place end)
for _, item in ipairs(found) do put_back(q, item.f, 1) end
wake_ordered(q)
return #found > 0 and redis.call('ZCARD', q.free) > 0 and 1 or 0

-- Read messages in delivery order without claiming them. Script on a whole queue.
-- Own arguments: the maximum number of messages, the maximum number of bytes (one message is always
-- read), and the number of messages to skip, 0 for the first call.
-- Returns a pair: the number of messages to skip in the next call (-1: none are left), and a list
-- of the group (or '') and the frame of each message; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
local left, room, skip = tonumber(ARGV[FIRST]), tonumber(ARGV[FIRST + 1]), tonumber(ARGV[FIRST + 2])
local t, passed, bytes, out = clock(), skip, 0, {}

-- Read from `length` messages; range(first, last) returns some of them.
local function read(q, length, range)
  if skip >= length then
    skip = skip - length
    return
  end
  local at = skip
  skip = 0
  while at < length and left > 0 and bytes < room do
    -- Messages that fit if they are as large as those read so far; #out is twice their number.
    local fitting = math.floor((room - bytes) * #out / math.max(2 * bytes, 1))
    local count = math.max(1, math.min(left, 100, #out, fitting))
    local fs = range(at, math.min(at + count, length) - 1)
    for _, f in ipairs(fs) do
      if f then
        out[#out + 1], out[#out + 2] = q.group or '', f
        bytes, left = bytes + #f, left - 1
      end
    end
    at, passed = at + count, passed + math.min(count, length - at)
  end
end

local function read_list(q, list)
  read(q, redis.call('LLEN', list), function(a, b) return redis.call('LRANGE', list, a, b) end)
end

local function read_set(q, set)
  read(q, redis.call('ZCARD', set), function(a, b)
    return redis.call('HMGET', q.msg, unpack(redis.call('ZRANGE', set, a, b)))
  end)
end

local first_call = skip == 0
for _, q in ipairs(parts(config, t)) do
  if first_call then
    enqueue_arrivals(q, t)
    wake(q)
  end
  read_set(q, q.back)
  for i = #q.levels, 1, -1 do read_list(q, ready(q, q.levels[i])) end
  read_list(q, q.ingress)
  read_set(q, q.due)
end
return {left > 0 and bytes < room and -1 or passed, out}

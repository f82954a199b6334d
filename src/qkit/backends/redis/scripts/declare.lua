-- Declare a queue or topic. The last declaration of a field wins; unset fields have defaults.
-- KEYS: 1 meta, 2 the ingress list.
-- ARGV: 1 kind, 2 '1' to keep an existing declaration unchanged, 3 default dead-letter queue or '',
-- then names and values of fields. Without ARGV, a list that another program created is declared
-- as a queue, and nothing else is created.
-- Returns the declared kind, which may differ from ARGV[1]; false if the queue does not exist.
local kind = redis.call('HGET', KEYS[1], 'kind')
local wanted = ARGV[1] or (redis.call('LLEN', KEYS[2]) > 0 and 'queue')
if kind and kind ~= wanted then return kind end
if not wanted then return false end
if kind and ARGV[2] == '1' then return kind end
redis.call('HSET', KEYS[1], 'kind', wanted)
-- Tokens start at the time of the first declaration, in microseconds. A queue that is deleted and
-- declared again therefore does not reuse a token that an old consumer still holds.
local t = redis.call('TIME')
redis.call('HSETNX', KEYS[1], 'seq', string.format('%.0f', t[1] * 1000000 + t[2]))
if ARGV[3] and ARGV[3] ~= '' then redis.call('HSETNX', KEYS[1], 'dead_letter', ARGV[3]) end
for i = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return wanted

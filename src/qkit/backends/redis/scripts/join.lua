-- Add a group to a topic. Earlier messages go only to the existing groups.
-- Script on a whole queue. Own arguments: the group's name, '1' for an ordered subscription.
-- Returns the kind, 'queue' or 'topic', and 1 if the queue has or had an ordered subscription, else
-- 0; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
if config.kind == 'topic' then
  distribute(config, clock())
  redis.call('SADD', KEYS[3], ARGV[FIRST])
end
if ARGV[FIRST + 1] == '1' then redis.call('HSET', KEYS[1], 'ordered', 1) end
return {config.kind, config.ordered and 1 or 0}

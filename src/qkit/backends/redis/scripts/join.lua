-- Add a group to a topic. Earlier messages go only to the existing groups.
-- Script on a whole queue. Own argument: the group's name.
-- Returns the kind, 'queue' or 'topic'; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
if config.kind == 'topic' then
  distribute(config, clock())
  redis.call('SADD', KEYS[3], ARGV[FIRST])
end
return config.kind

-- Add a group to a topic. Messages that were there before go to the groups that were there.
-- Script on a whole queue. Own argument: the group's name.
-- Returns the kind; false if there is no such queue.
local config, reply = open_whole()
if not config then return reply end
if config.kind == 'topic' then
  distribute(config, clock())
  redis.call('SADD', KEYS[3], ARGV[FIRST])
end
return config.kind

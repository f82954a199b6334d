-- Copy messages that another program pushed to a topic's ingress list to each group of the topic.
-- Script on a whole queue; no own arguments. Returns 1; false if the queue does not exist.
local config, reply = open_whole()
if not config then return reply end
parts(config, clock())
return 1

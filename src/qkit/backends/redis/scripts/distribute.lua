-- Copy what another program pushed to a topic's own name to each of its groups.
-- Script on a whole queue; no own arguments. Returns 1; false if there is no such queue.
local config, reply = open_whole()
if not config then return reply end
parts(config, clock())
return 1

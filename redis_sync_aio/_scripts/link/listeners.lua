-- Count who listens to an inbox, as scripts do that hand something over, and send it an empty
-- message.
-- KEYS   none
-- ARGV   1 inbox
-- REPLY  {how many connections listen to it here, how many clients there are (0: not known)}
-- REPLAY Nothing is changed.
-- COST   O(1)
-- include: publish
local heard, here = publish(ARGV[1], ''), listening(ARGV[1])
if type(heard) == 'table' then return heard end
local info = redis.pcall('INFO', 'clients')
local clients = type(info) == 'string' and string.match(info, 'connected_clients:(%d+)')
return {here, tonumber(clients or 0)}

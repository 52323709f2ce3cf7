-- Count who listens to an inbox, as scripts do that hand something over, and send it an empty
-- message.
-- KEYS   none
-- ARGV   1 inbox
-- REPLY  how many connections listen to it at this server
-- REPLAY Nothing is changed.
-- COST   O(1)
-- include: publish
local here, heard = listening(ARGV[1]), publish(ARGV[1], '')
return type(heard) == 'table' and heard or here

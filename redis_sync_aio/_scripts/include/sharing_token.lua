-- A process whose tasks share what it holds says so by its token, 'host:pid:inbox:number~': it gets RANGE fences with
-- a grant, one for each task that has it in turn, and is told when somebody waits.
local RANGE = 128
local function sharer(token)
  if string.byte(token, -1) == 126 then return string.match(token, ':(%x+):(%d+)~$') end
end

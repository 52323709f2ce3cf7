"""The command `doctor`: look at a server, and say what its settings mean for locks. It writes nothing there.

`facts` asks, and has the answers; `findings` has the table that judges them; `command` prints.
"""

"""The command `doctor`: look at a server, and say what its settings mean for locks. It writes nothing there.

`questions` asks, `facts` has the answers, modules of checks judge them, and `findings` says what a judgement is.
"""

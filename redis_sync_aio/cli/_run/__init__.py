"""The command `run`: hold a lock while a program runs.

`command` has the options and the exit codes, `holding` acquires and releases, `child` is the program and its signals.
"""

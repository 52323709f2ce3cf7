"""The command `demo`: processes sell a stock under locks, one is killed, and the books are checked."""

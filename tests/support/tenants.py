"""A tenant of a shared server: a user with rights on the keys and channels of one prefix only."""

from __future__ import annotations

PREFIX = "app1:"
COMMANDS = (
    *("-@all", "+evalsha", "+eval", "+subscribe", "+publish", "+get", "+set", "+del", "+pttl", "+pexpire", "+time"),
    *("+zadd", "+zrem", "+zrange", "+zscore", "+zcard", "+hmget", "+hget", "+hset", "+hdel", "+zrangebyscore"),
    *("+zremrangebyrank", "+watch", "+unwatch", "+multi", "+exec", "+zmscore", "+exists", "+incrby"),
    *("+pubsub|numsub", "+scan", "+command", "+cluster|slots"),
)
TENANT = ("reset", "on", ">secret", f"~{PREFIX}*", "resetchannels", f"&{PREFIX}*", *COMMANDS)
CREDENTIALS = {"username": "tenant", "password": "secret"}

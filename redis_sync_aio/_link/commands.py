"""What a command may do: before `multi` a body only reads, or running it twice would do more than running it once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from weakref import WeakKeyDictionary

from redis.asyncio import Redis

from .borrow import Borrowed, packer
from .call import Reply


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


READS = _names("""
    BITCOUNT BITFIELD_RO BITPOS DBSIZE DUMP ECHO EVALSHA_RO EVAL_RO EXISTS EXPIRETIME FCALL_RO GEODIST GEOHASH GEOPOS
    GEORADIUSBYMEMBER_RO GEORADIUS_RO GEOSEARCH GET GETBIT GETRANGE HEXISTS HEXPIRETIME HGET HGETALL HKEYS HLEN HMGET
    HPEXPIRETIME HPTTL HRANDFIELD HSCAN HSTRLEN HTTL HVALS INFO KEYS LCS LINDEX LLEN LOLWUT LPOS LRANGE MGET OBJECT
    PEXPIRETIME PFCOUNT PING PTTL RANDOMKEY SCAN SCARD SDIFF SINTER SINTERCARD SISMEMBER SMEMBERS SMISMEMBER SORT_RO
    SRANDMEMBER SSCAN STRLEN SUBSTR SUNION TIME TTL TYPE XINFO XLEN XPENDING XRANGE XREAD XREVRANGE ZCARD ZCOUNT ZDIFF
    ZINTER ZINTERCARD ZLEXCOUNT ZMSCORE ZRANDMEMBER ZRANGE ZRANGEBYLEX ZRANGEBYSCORE ZRANK ZREVRANGE ZREVRANGEBYLEX
    ZREVRANGEBYSCORE ZREVRANK ZSCAN ZSCORE ZUNION
""")
"""Commands that read, and do nothing else."""

BLOCKING = _names("BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH BZMPOP BZPOPMAX BZPOPMIN WAIT WAITAOF")
"""Commands that wait for others."""

SESSION = _names("""
    ASKING AUTH CLIENT HELLO MONITOR PSUBSCRIBE PSYNC PUNSUBSCRIBE QUIT READONLY READWRITE RESET SELECT SSUBSCRIBE
    SUBSCRIBE SUNSUBSCRIBE SYNC UNSUBSCRIBE
""")
"""Commands that change or end the connection, which belongs to the pool."""

CONTROL = frozenset(("DISCARD", "EXEC", "MULTI", "UNWATCH", "WATCH"))
"""Commands that a transaction is made of."""

_SCRIPTS = frozenset(("EVAL", "EVALSHA", "FCALL"))
"""Commands that may do anything, and say nothing of it."""

_EFFECTS = frozenset(("write", "may_replicate", "admin", "blocking", "pubsub"))

_asked: WeakKeyDictionary[Redis, dict[str, bool]] = WeakKeyDictionary()


def first_word(command: object) -> str:
    """Return the name of a command in capitals: "OBJECT" of redis-py's "OBJECT ENCODING"."""
    text = command.decode("latin-1") if isinstance(command, bytes) else str(command)
    return text.upper().split(" ", 1)[0]


def blocks(words: Iterable[object]) -> bool:
    """Return whether the command may wait for others."""
    first, *rest = words
    name = first_word(first)
    if name not in ("XREAD", "XREADGROUP"):
        return name in BLOCKING
    options = takewhile(lambda word: word != "STREAMS", map(first_word, rest))
    return "BLOCK" in options


async def only_reads(client: Redis, connection: Borrowed, command: object) -> bool:
    """Return whether a command that is not in `READS` has no effects either, as the server says; once per command.

    A server or user that does not know `COMMAND INFO` is no reason to refuse. Raises OUT_OF_REACH.
    """
    text = command.decode("latin-1") if isinstance(command, bytes) else str(command)
    name = text.lower().replace(" ", "|")
    if first_word(command) in _SCRIPTS:
        return False
    asked = _asked.setdefault(client, {})
    if name not in asked:
        (answer,) = await connection.exchange([packer(client)(("COMMAND", "INFO", name))])
        asked[name] = not (_flags(answer) & _EFFECTS)
    return asked[name]


def _flags(answer: Reply) -> set[str]:
    found = answer[0] if isinstance(answer, list) and answer else None
    if not isinstance(found, list) or len(found) < 3:
        return set()  # an error, or a command that the server does not know: it will say so
    return {flag.decode() if isinstance(flag, bytes) else str(flag) for flag in found[2]}

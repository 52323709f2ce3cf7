"""What a command may do: before `multi` a body only reads, or running it twice would do more than running it once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

import redis.exceptions
from redis.asyncio import Redis

from .borrow import Borrowed, Encodables, packer
from .client import PerClient


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

_asked: PerClient[dict[str, _About]] = PerClient()


def first_word(command: object) -> str:
    """Return the name of a command in capitals: "OBJECT" of redis-py's "OBJECT ENCODING"."""
    return _text(command).upper().split(" ", 1)[0]


def blocks(words: Iterable[object]) -> bool:
    """Return whether the command may wait for others."""
    first, *rest = words
    name = first_word(first)
    if name not in ("XREAD", "XREADGROUP"):
        return name in BLOCKING
    options = takewhile(lambda word: word != "STREAMS", map(first_word, rest))
    return "BLOCK" in options


async def only_reads(client: Redis, connection: Borrowed, words: Encodables) -> bool | redis.exceptions.ResponseError:
    """Return whether a command that is not in `READS` has no effects either, as the server says; once per command.

    Also true when the server does not know the command: it will say so. Returns the error when it does not answer
    that. Raises OUT_OF_REACH.
    """
    first, *rest = _text(words[0]).lower().split()
    part = rest[0] if rest else _text(words[1]).lower() if len(words) > 1 else ""
    if first.upper() in _SCRIPTS or (first == "script" and part != "exists"):
        return False
    whole = f"{first}|{part}"
    found = await _about(client, connection, *((first, whole) if rest else (first,)))
    if isinstance(found, _About) and found.parts and part and not rest:
        found = await _about(client, connection, first, whole)
    return not found.effects if isinstance(found, _About) else found


class _About(NamedTuple):
    """What the server says of a command."""

    effects: bool
    parts: bool
    """It has subcommands, which have effects of their own."""


async def _about(client: Redis, connection: Borrowed, *names: str) -> _About | redis.exceptions.ResponseError:
    """Ask about a command, or about one with a part of it: before Redis 7 only the former is known to have effects."""
    known = _asked.get(client, dict)
    if names[-1] not in known:
        (answer,) = await connection.exchange([packer(client)(("COMMAND", "INFO", *names))])
        if isinstance(answer, redis.exceptions.ResponseError):
            return answer
        if not isinstance(answer, list) or len(answer) != len(names):
            return redis.exceptions.ResponseError(f"an answer of another kind to COMMAND INFO: {answer!r}")
        # What is missing is no command of the server's.
        found = [about for about in answer if isinstance(about, list) and len(about) > 2]
        flags = {_text(flag) for about in found for flag in about[2]}
        known[names[-1]] = _About(bool(flags & _EFFECTS), any(len(about) > 9 and about[9] for about in found))
    return known[names[-1]]


def _text(word: object) -> str:
    return word.decode("latin-1") if isinstance(word, bytes) else str(word)

"""Effects of commands. Before `multi` a body may only read: it may run more than once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import redis.exceptions
from redis.asyncio import Redis

from .._client.checkout import CheckedOut, Encodables, name_words, packer
from .._client.settings import PerClient


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

_PARTS = {
    "ACL": _names("CAT DRYRUN GENPASS GETUSER HELP LIST USERS WHOAMI"),
    "CLIENT": _names("GETNAME GETREDIR HELP ID INFO LIST TRACKINGINFO"),
    "CLUSTER": _names("HELP REPLICAS SLAVES"),
    "COMMANDLOG": _names("GET HELP LEN"),
    "CONFIG": _names("GET HELP"),
    "LATENCY": _names("DOCTOR GRAPH HELP HISTOGRAM HISTORY LATEST"),
    "MODULE": _names("HELP LIST"),
    "PUBSUB": _names("CHANNELS HELP NUMPAT NUMSUB SHARDCHANNELS SHARDNUMSUB"),
    "SLOWLOG": _names("GET HELP LEN"),
}
"""Parts of commands that read, although the server calls them administration, or CLIENT is refused otherwise."""

_EXPIRY = _names("EX EXAT PERSIST PX PXAT")
_UNLESS = {
    "ACL LOG": _names("RESET"),
    "BITFIELD": _names("INCRBY SET"),
    "GEORADIUS": _names("STORE STOREDIST"),
    "GEORADIUSBYMEMBER": _names("STORE STOREDIST"),
    "GETEX": _EXPIRY,
    "HGETEX": _EXPIRY,
    "SORT": _names("STORE"),
}
"""Commands that read unless one of these words is among their arguments. (A key of that name: refused in error.)"""

_SCRIPTS = frozenset(("EVAL", "EVALSHA", "FCALL"))
"""Commands that may do anything, without a flag that says so."""

_UNFLAGGED = frozenset(("FUNCTION KILL", "MEMORY PURGE"))
"""Subcommands of the same kind, next to all of SCRIPT but EXISTS."""

_EFFECTS = frozenset(("write", "may_replicate", "admin", "blocking", "pubsub"))

_asked: PerClient[dict[str, _About]] = PerClient()


def first_word(command: object) -> str:
    """Return the name of a command in capitals: "OBJECT" of redis-py's "OBJECT ENCODING"; "" when there is none."""
    words = name_words(command)
    return _text(words[0]).upper() if words else ""


def blocks(words: Iterable[object]) -> bool:
    """Return whether the command may wait for others."""
    first, *rest = words
    name = first_word(first)
    if name not in ("XREAD", "XREADGROUP"):
        return name in BLOCKING
    options = takewhile(lambda word: word != "STREAMS", (_text(word).upper() for word in rest))
    return "BLOCK" in options


def known_to_read(words: Encodables) -> bool:
    """Return whether the command certainly reads and does nothing else. The server may know more: see `only_reads`."""
    name, part, rest = _split(words)
    if name in READS or part in _PARTS.get(name, ()):
        return True
    refused = _UNLESS.get(name) or _UNLESS.get(f"{name} {part}")
    return refused is not None and not any(_text(word).upper() in refused for word in rest)


def changes_session(words: Encodables) -> bool:
    """Return whether the command may change or end the connection."""
    return first_word(words[0]) in SESSION and not known_to_read(words)


def without_effect(words: Encodables) -> Encodables:
    """Return a command that reads the same and leaves the key as it is, also where Redis notes something in it.

    PFCOUNT of one key stores the count that it has computed: that would be a conflict with ourselves, if the key is
    watched. Of several keys, though they be the same one, nothing is stored.
    """
    if len(words) == 2 and first_word(words[0]) == "PFCOUNT":
        return (*words, words[1])
    return words


def _split(words: Encodables) -> tuple[str, str, Sequence[Any]]:
    """Return the name of the command and of its part, if it has any, in capitals; and the arguments after the name."""
    name, *more = (_text(word).upper() for word in name_words(words[0]))
    rest = words[1:]
    return name, more[0] if more else _text(rest[0]).upper() if rest else "", rest


async def only_reads(client: Redis, connection: CheckedOut, words: Encodables) -> bool | redis.exceptions.ResponseError:
    """Return whether a command that is not `known_to_read` has no effects either, as the server says; once per command.

    Also true when the server does not know the command: it will say so. Returns the error when it does not answer
    that. Raises OUT_OF_REACH.
    """
    name, part, _ = _split(words)
    if name in _SCRIPTS or f"{name} {part}" in _UNFLAGGED or (name == "SCRIPT" and part != "EXISTS"):
        return False
    first, whole = name.lower(), f"{name}|{part}".lower()
    in_two = len(name_words(words[0])) > 1
    found = await _about(client, connection, *((first, whole) if in_two else (first,)))
    if isinstance(found, _About) and found.parts and part and not in_two:
        found = await _about(client, connection, first, whole)
    return not found.effects if isinstance(found, _About) else found


class _About(NamedTuple):
    """The facts about a command that the server knows."""

    effects: bool
    parts: bool
    """Whether it has subcommands, which have effects of their own."""


async def _about(client: Redis, connection: CheckedOut, *names: str) -> _About | redis.exceptions.ResponseError:
    """Ask about a command, or about one with a part of it: before Redis 7 only the former is known to have effects."""
    known = _asked.get(client, dict)
    if names[-1] not in known:
        (answer,) = await connection.exchange([packer(client)(("COMMAND", "INFO", *names))])
        if isinstance(answer, redis.exceptions.ResponseError):
            return answer
        if not isinstance(answer, list) or len(answer) != len(names):
            return redis.exceptions.ResponseError(f"an answer of another kind to COMMAND INFO: {answer!r}")
        # A missing name is no command of the server.
        found = [about for about in answer if isinstance(about, list) and len(about) > 2]
        flags = {_text(flag) for about in found for flag in about[2]}
        known[names[-1]] = _About(bool(flags & _EFFECTS), any(len(about) > 9 and about[9] for about in found))
    return known[names[-1]]


def _text(word: object) -> str:
    """Return a word as it is sent, as text: `str` of a member of an enumeration may be another one."""
    if isinstance(word, str):
        word = word.encode("utf-8", "surrogatepass")
    return bytes(word).decode("latin-1") if isinstance(word, (bytes, bytearray, memoryview)) else str(word)

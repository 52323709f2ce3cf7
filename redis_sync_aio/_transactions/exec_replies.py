"""The answer to EXEC: as the client would return it, its placeholders, the effects of its commands, and its marker."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn, TypeAlias

import redis.exceptions
from redis.asyncio import Redis

from .._client.checkout import NEVER_DECODE, OUT_OF_REACH, CheckedOut, Encodables, Packed, checkout, name_words, packer
from .._client.replies import TRANSIENT, Reply, answered
from .._client.settings import RETRY, PerClient, response_timeout_of
from .._core.clock import now
from .._core.keys import marker_key
from ..errors import PartiallyApplied, TransactionMisuse
from ..errors._misuse import Misuse

# -- The placeholder for the reply to a queued command, which is not known before EXEC -------------------------


class QueuedReply:
    """The result of a queued command. Its reply comes with EXEC, so whatever looks at it raises TransactionMisuse.

    Awaiting that of a write does nothing, since redis-py's types ask for an ``await``. Code that awaits a read wants to
    decide by what it says, and cannot.
    """

    __slots__ = ("_name", "_reads")

    def __init__(self, name: str, reads: bool) -> None:
        self._name = name
        self._reads = reads

    def __await__(self) -> Generator[Any, Any, QueuedReply]:
        if self._reads:
            raise TransactionMisuse.of(Misuse.AWAITED_READ, self._name)
        return self
        yield

    def __repr__(self) -> str:
        return f"<{self._name}, queued: the reply comes with EXEC>"

    def _not_known(self, *_: object) -> NoReturn:
        """Raise TransactionMisuse."""
        raise TransactionMisuse.of(Misuse.REPLY_NOT_KNOWN, self._name)

    __bool__ = __str__ = __format__ = __int__ = __float__ = __index__ = __bytes__ = __len__ = _not_known
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __iter__ = __getitem__ = __contains__ = _not_known
    __hash__ = object.__hash__


# -- Effects of commands. Before `multi` a body may only read: it may run more than once -----------------------


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
    """True if it has subcommands, which have effects of their own."""


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


Command: TypeAlias = tuple[Packed, Encodables, dict[str, Any]]
"""A queued command: as it is sent, and as redis-py gave it, with its options."""

Replies: TypeAlias = tuple[Any, ...]
"""The replies to the commands of a transaction, in their order."""


@dataclass(frozen=True)
class ExecUnanswered:
    """The outcome of an EXEC that was sent and got no answer: it may have been executed."""

    cause: Exception


UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, redis.exceptions.RedisError)
"""Errors that the client's decoder, or a callback of it, raises for a reply. The command was executed."""


async def read_replies(connection: CheckedOut, commands: Sequence[Command], raw: Sequence[Reply]) -> Replies:
    """Return the replies to ``commands``. Raises PartiallyApplied if one failed, or cannot be read."""
    replies: list[Any] = []
    for (_, words, options), reply in zip(commands, raw, strict=True):
        if isinstance(reply, Exception):
            replies.append(reply)
            continue
        try:
            read = reply if NEVER_DECODE in options else connection.decoded(reply)
            replies.append(await connection.as_from_client(words, options, read))
        except UNREADABLE as error:
            replies.append(error)
    bad = [number for number, reply in enumerate(replies) if isinstance(reply, Exception)]
    if not bad:
        return tuple(replies)
    failed = [number for number in bad if isinstance(raw[number], Exception)]
    first = (failed or bad)[0]
    command = first_word(commands[first][1][0])
    partially = PartiallyApplied(replies=tuple(replies), command=command, index=first, failed=len(failed))
    raise partially from replies[first]


# -- The marker of one attempt at a transaction: it tells whether an EXEC whose answer was lost was executed ---
#
# The marker is a key of its own for each attempt. It is watched with the other keys, and set to "done" in the same
# MULTI. When the answer to EXEC is lost, there are three cases: it was executed; it never will be; or it is still on
# its way, in some socket, and will be executed later (a clean-up can be overtaken by what it cleans up). So to look
# is not enough. We set the marker to "void", if it does not exist:
#
# - it says "done": EXEC came first, and all writes were made;
# - it says "void": EXEC was not executed before. Should it arrive now, it finds that a key which it watches was
#   changed, and does nothing. So the body may run again, immediately.
#
# Either way the answer holds forever. Asking twice gives the same answer: a client that finds "void" has set it
# itself.


DONE, VOID = b"done", b"void"
MARKER_TTL = 60.0
"""Seconds that a marker stays on the server."""
RETRY_FOR = 20.0
"""Seconds for which the server is asked while it is unreachable."""


class CommitMarker:
    """The mark that says whether one attempt was committed."""

    def __init__(self, client: Redis, key: bytes, prefix: bytes, response_timeout: float | None = None) -> None:
        self._client = client
        self._response_timeout = response_timeout_of(client, response_timeout)
        self.key: bytes = marker_key(key, secrets.token_hex(8).encode(), prefix)
        self.done: Encodables = self._set(DONE)

    def _set(self, value: bytes, *options: str) -> Encodables:
        return ("SET", self.key, value, "PX", int(MARKER_TTL * 1000), *options)

    async def find_out(self, sent: float) -> bool | None:
        """Return whether EXEC, sent at that local time, was executed (True) or never will be (False); None: not known.

        Takes as long as Redis is unreachable, 20 seconds at most; raises CommandRefused when the server refuses to
        tell. On cancellation the question may still be answered.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_FOR):
                for delay in RETRY:
                    value = await self._ask()
                    if value == DONE:
                        return True
                    if value == VOID:  # after `MARKER_TTL` a "done" would be forgotten, and our "void" prove nothing
                        return False if now() < sent + MARKER_TTL else None
                    await asyncio.sleep(delay)
        return None

    async def _ask(self) -> bytes | None:
        """Set the marker to "void" if there is none, and return its value; None: ask again.

        Raises CommandRefused if the server will not tell however often it is asked.
        """
        pack = packer(self._client)
        packed = [pack(words) for words in (self._set(VOID, "NX"), ("GET", self.key))]
        value: Any = None
        try:
            connection = await checkout(self._client, self._response_timeout)
            try:
                stored, value = await connection.exchange(packed, raw=(0, 1))
            finally:
                await connection.give_back(drop=not connection.in_step)
            error = stored if value is None else value
        except OUT_OF_REACH as failed:
            error = failed
        if not isinstance(error, Exception):
            return None if value is None else bytes(value)
        refused = answered(self.key, error)
        if refused is not None and refused.code not in TRANSIENT:
            raise refused
        return None

"""Replies of a server: their words, and the meaning of errors, as it sends them and as redis-py raises them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import hiredis
import redis.exceptions

from .._core.display import text
from ..errors import CommandRefused, CoordinatorClosed, PushUnavailable, SyncError, Unreachable
from ..errors._servers import BY_CODE, LACKING

# -- Words of commands and replies, as they go over a connection -----------------------------------------------


Reply: TypeAlias = Any
"""A reply as hiredis returns it: int, bytes, None, list, dict …; the engine decodes it."""

Replies: TypeAlias = list[Reply]
"""Replies to several commands, error replies of the server among them as `ReplyError`."""

Argument: TypeAlias = bytes | int
Words: TypeAlias = tuple[Argument, ...]


class ReplyError(Exception):
    """An error reply of the server, verbatim."""


PackCommand: TypeAlias = Callable[[Words], bytes]

pack: PackCommand = cast("PackCommand", hiredis.pack_command)
"""Return a command as bytes."""


def unpack(commands: bytes) -> list[Words]:
    """Return the commands that `pack` made ``commands`` of."""
    reader = hiredis.Reader()
    reader.feed(commands)
    return [tuple(words) for words in iter(reader.gets, False)]


def pack_reply(reply: Reply) -> bytes:
    """Return bytes that are read as ``reply``, which may be, or contain, an error as redis-py has read it."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Exception):
        return b"-%b\r\n" % str(error_answer(reply) or reply).replace("\r\n", " ").encode()
    if isinstance(reply, (list, tuple, set)):
        return b"*%d\r\n%b" % (len(reply), b"".join(map(pack_reply, reply)))
    if isinstance(reply, dict):
        return b"%%%d\r\n%b" % (len(reply), b"".join(pack_reply(part) for pair in reply.items() for part in pair))
    word = reply if isinstance(reply, bytes) else str(reply).encode()
    return b"$%d\r\n%b\r\n" % (len(word), word)


# -- The meaning of error replies, as the server sends them and as redis-py raises them ------------------------


# Replies that say "not now": nothing was executed, so the call is sent again after a pause.
TRANSIENT = frozenset({"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "MISCONF", "NOREPLICAS"})

# Redis 6.2 wraps the error of a command that a script ran, or that it returned after a pcall. Later versions put its
# code first. redis-py removes the leading ERR.
_WRAPPED = re.compile(r"^(?:ERR )?(?:Error running script.*?|@user_script: ?\d+): -?([A-Z]{3,}) (.*)$", re.DOTALL)
# EXEC reports a command that was refused when it was queued, or the server's state.
_DISCARDED = re.compile(r"^(?:EXECABORT )?Transaction discarded because of: -?(.*)$", re.DOTALL)
# A script that the user may run has called a command that the user may not run: Valkey and Redis 7; Redis 6.2.
_NOT_IN_A_SCRIPT = re.compile(r"ACL failure in script|The user executing the script can't")
# The hash of the script and the number of the line do not help a reader of the error.
_OF_A_SCRIPT = re.compile(
    r"^(?:ERR )?Error running script \(call to \w+\): @user_script: ?\d+: (?:@user_script: ?\d+: )?-?"
    r"|^@user_script: ?\d+: -?|,? script: ?[0-9a-f]*,? on @user_script: ?\d+\.?"
)
# A script has raised WRONGTYPE by `error`: Valkey and Redis 7. Redis 6.2 wraps that like any other error.
_RAISED = re.compile("^ERR (?=WRONGTYPE )")
# A script cannot compute with a value that this package never writes.
_NO_NUMBER = re.compile(r"user_script: ?\d+: (attempt to (?:perform|compare) .*)", re.DOTALL)
_NO_SCRIPTS = re.compile(r"(?:run the '|unknown command ['`]?)(evalsha|eval)\b", re.IGNORECASE)
_UNKNOWN = "ERR unknown command"


def scripts_refused(message: str) -> str:
    """Return which command this user or this server does not run by an error reply: evalsha or eval; else empty."""
    refused = _NO_SCRIPTS.search(message)
    return refused[1].lower() if refused else ""


def error_code(message: str) -> str:
    """Return the code of an error reply, its first word; if EXEC passes another error on, the code of that error."""
    message = _passed_on(message)
    if _NOT_IN_A_SCRIPT.search(message):
        return "NOPERM"
    wrapped = _WRAPPED.match(message)
    return wrapped[1] if wrapped else message.split(" ", 1)[0]


def _passed_on(message: str) -> str:
    """Return ``message`` without the words of EXEC, and with the code of what a script said about its data."""
    discarded = _DISCARDED.match(message)
    message = _RAISED.sub("", discarded[1] if discarded else message)
    failed = _NO_NUMBER.search(message)
    return f"WRONGTYPE a script met data in another form: {failed[1]}" if failed else message


def is_transient(error: SyncError) -> bool:
    """Return whether a later attempt may succeed, and the failed one changed nothing."""
    return isinstance(error, Unreachable) or (isinstance(error, CommandRefused) and error.code in TRANSIENT)


def refusal(
    name: bytes, message: str, no_scripts: str = "", keys: tuple[bytes, ...] = (), again: bool = False
) -> CommandRefused:
    """Return the typed error for an error reply about the lock ``name``, or about the connection if that is empty.

    ``no_scripts`` is the first error reply that refused scripts, ``keys`` are those of the lock, and ``again`` says
    that the reply to an earlier copy of the command was lost.
    """
    message = _passed_on(message)
    code = error_code(message)
    reply = _OF_A_SCRIPT.sub("", message)
    kind, advice = BY_CODE.get(code, (CommandRefused, "" if again else "nothing was changed"))
    if "cluster support disabled" in reply:
        advice = LACKING["cluster"]
    elif code == "ERR" and scripts_refused(reply):
        advice = LACKING["scripts"]
    if no_scripts and (code == "NOPERM" or reply.startswith(_UNKNOWN)):
        reply = no_scripts if scripts_refused(reply) else f"{no_scripts}; without scripts it answered {reply}"
    shown = [text(key) for key in keys]
    if code == "WRONGTYPE" and shown and not reply.startswith(tuple(f"WRONGTYPE {key} " for key in shown)):
        reply += f": {'one of ' * (len(shown) > 1)}{', '.join(shown)} belongs to another program"
    if again:
        advice += ("; " if advice else "") + "an earlier copy, whose reply was lost, may have been executed"
    what = f"a command for {text(name)!r}" if name else "the connection"
    return kind(f"the server refused {what}: {reply.rstrip('.')} ({advice})", code=code)


# redis-py replaces the code of an error reply by a class.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (redis.exceptions.NoScriptError, "NOSCRIPT"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
    (redis.exceptions.MovedError, "MOVED"),
    (redis.exceptions.ExecAbortError, "EXECABORT"),
)
_CODE = re.compile(r"[A-Z]{3,} ")
_NO_CREDENTIALS = re.compile("Authentication required|HELLO must be called with the client already authenticated")


def error_answer(error: BaseException) -> ReplyError | None:
    """Return the server's error reply as it was; None if ``error`` is not an error reply.

    Connections by Sentinel turn READONLY into a connection error, whose context it is.
    """
    if isinstance(error, ReplyError):
        return error
    if isinstance(error.__context__, redis.exceptions.ReadOnlyError):
        error = error.__context__
    if isinstance(error, redis.exceptions.AuthenticationError):
        code: str | None = "NOAUTH" if _NO_CREDENTIALS.match(str(error)) else "WRONGPASS"
    else:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), None)
    if code is not None:
        return ReplyError(f"{code} {error}")
    if not isinstance(error, redis.exceptions.ResponseError):
        return None
    return ReplyError(str(error) if _CODE.match(str(error)) else f"ERR {error}")


def with_own_errors(replies: Iterable[Reply]) -> Replies:
    """Return ``replies`` with each error reply as `ReplyError`, also if redis-py has read it."""
    return [error_answer(it) if isinstance(it, Exception) else it for it in replies]


def answered(name: bytes, error: BaseException) -> CommandRefused | None:
    """Return the typed error if ``error`` is the server's reply to a command about ``name``, else None."""
    answer = error_answer(error)
    if answer is None:
        return None
    refused = refusal(name, str(answer))
    refused.__cause__ = error
    return refused


_REDIS_ERRORS: dict[str, type[redis.exceptions.RedisError]] = {
    "OOM": redis.exceptions.OutOfMemoryError,
    "NOPERM": redis.exceptions.NoPermissionError,
    "NOAUTH": redis.exceptions.AuthenticationError,
    "WRONGPASS": redis.exceptions.AuthenticationError,
    "READONLY": redis.exceptions.ReadOnlyError,
    "LOADING": redis.exceptions.BusyLoadingError,
}


@contextmanager
def redis_errors() -> Iterator[None]:
    """Turn our errors into those that a user of redis-py catches. Unreachable is a ConnectionError already."""
    try:
        yield
    except CommandRefused as error:
        raise _REDIS_ERRORS.get(error.code, redis.exceptions.ResponseError)(str(error)) from error
    except (CoordinatorClosed, PushUnavailable) as error:
        raise redis.exceptions.ConnectionError(str(error)) from error

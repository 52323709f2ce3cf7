"""What the errors that redis-py raises mean: an answer of the server, or no answer."""

from __future__ import annotations

import re

import redis.exceptions

from ..errors import CommandRefused
from .call import ReplyError, refusal

# redis-py takes the code away from an error answer and makes it a class.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (redis.exceptions.NoScriptError, "NOSCRIPT"),
    (redis.exceptions.ReadOnlyError, "READONLY"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.OutOfMemoryError, "OOM"),
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
    (redis.exceptions.ExecAbortError, "EXECABORT"),
)
_CODE = re.compile(r"[A-Z]{3,} ")
_NO_CREDENTIALS = re.compile("Authentication required|HELLO must be called with the client already authenticated")


def error_answer(error: BaseException) -> ReplyError | None:
    """Return the server's error answer as it was; None when ``error`` is no answer.

    Sentinel's connections make "no answer" of READONLY; it is the context of their error.
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


def answered(
    name: bytes, error: BaseException, no_scripts: str = "", keys: tuple[bytes, ...] = (), again: bool = False
) -> CommandRefused | None:
    """Return the typed error when ``error`` is the server's answer to a command about ``name``; None when it is not.

    ``no_scripts``, ``keys``, ``again``: as `refusal`.
    """
    answer = error_answer(error)
    if answer is None:
        return None
    refused = refusal(name, str(answer), no_scripts, keys, again)
    refused.__cause__ = error
    return refused

"""D9, D10, D15, D16: an error answer means the same whichever server words it, and whichever client has read it."""

from __future__ import annotations

import pytest
from redis.exceptions import AuthenticationError, ResponseError

from redis_sync_aio import CommandRefused
from redis_sync_aio._client.replies import error_answer, error_code, refusal
from redis_sync_aio.errors import OutOfMemory, PermissionDenied, WrongKeyType

SCRIPT = "Error running script (call to f_ec10): @user_script:6:"
WRONG = "Operation against a key holding the wrong kind of value"


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        (f"WRONGTYPE {WRONG} script: ec10, on @user_script:6.", "WRONGTYPE", WrongKeyType),
        (f"ERR {SCRIPT} WRONGTYPE {WRONG}", "WRONGTYPE", WrongKeyType),  # Redis 6.2
        (f"{SCRIPT} WRONGTYPE {WRONG}", "WRONGTYPE", WrongKeyType),  # Redis 6.2, read by redis-py
        ("ERR WRONGTYPE {name}:fence holds data script: on @user_script:1.", "WRONGTYPE", WrongKeyType),  # by error()
        (f"ERR {SCRIPT} user_script:6: attempt to compare number with nil", "WRONGTYPE", WrongKeyType),
        ("ERR user_script:6: attempt to perform arithmetic on a nil value script: ec10", "WRONGTYPE", WrongKeyType),
        (f"ERR {SCRIPT} -OOM command not allowed when used memory > 'maxmemory'.", "OOM", OutOfMemory),
        (f"{SCRIPT} -OOM command not allowed when used memory > 'maxmemory'.", "OOM", OutOfMemory),
        (f"{SCRIPT} -READONLY You can't write against a read only replica.", "READONLY", CommandRefused),
        (f"{SCRIPT} -MISCONF Redis is configured to save RDB snapshots", "MISCONF", CommandRefused),
        ("@user_script: 164: -OOM command not allowed when used memory > 'maxmemory'.", "OOM", OutOfMemory),  # returned
        ("ERR The user executing the script can't run this command", "NOPERM", PermissionDenied),
        ("ERR unknown command 'EVALSHA'", "ERR", CommandRefused),
    ],
)
def test_error_answers(message: str, code: str, kind: type[CommandRefused]) -> None:
    assert error_code(message) == code
    error = refusal(b"name", message)
    assert type(error) is kind
    assert error.code == code
    assert "name" in str(error)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (AuthenticationError("invalid username-password pair or user is disabled."), "WRONGPASS invalid username"),
        (AuthenticationError("Authentication required."), "NOAUTH Authentication required"),
        (AuthenticationError("HELLO must be called with the client already authenticated, otherwise"), "NOAUTH HELLO"),
        (ResponseError("DB index is out of range"), "ERR DB index"),
        (ResponseError("unknown command 'EVALSHA'"), "ERR unknown command"),
        (ResponseError(f"WRONGTYPE {WRONG}"), "WRONGTYPE Operation"),
    ],
)
def test_codes_that_redis_py_takes_away(error: Exception, answer: str) -> None:
    assert str(error_answer(error)).startswith(answer)

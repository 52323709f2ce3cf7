"""The doctor tells what the rights of a user lack for locks, and is content with what it advises."""

from __future__ import annotations

from typing import Any

import pytest

from redis_sync_aio import AcquireTimeout, Coordinator
from redis_sync_aio.embedded import EmbeddedServer

from ..support.doctor import examine, levels, told
from ..support.pairwise import first_of

SECRET = "correct-horse"


async def user(server: EmbeddedServer, *rules: str) -> dict[str, str]:
    """Give the server a user, and return how a program logs in as it."""
    async with server.client() as client:
        made: Any = client
        await made.execute_command("ACL", "SETUSER", "locks", "reset", "on", f">{SECRET}", *rules)
    return {"REDIS_USERNAME": "locks", "REDIS_PASSWORD": SECRET}


@pytest.mark.ci
async def test_rights() -> None:
    """No scripts; a command too few; no channels. Each is told to a user that may look, by what it may not do."""
    every = ("~*", "&*", "+@all")
    with EmbeddedServer(port=0) as server:
        env = await user(server, *every, "-evalsha", "-eval")
        assert told(server.url, "warn", "scripts", **env) == "user 'locks' may not call scripts"
        env = await user(server, *every, "-zadd", "-pexpire")
        assert told(server.url, "bad", "commands", **env) == "user 'locks' may not run PEXPIRE, ZADD"
        env = await user(server, *every, "resetchannels")
        assert told(server.url, "warn", "push", **env).startswith("messages cannot be pushed: ")
        env = await user(server, *every, "-publish")
        assert told(server.url, "warn", "push", **env).startswith("messages cannot be pushed: ")


@pytest.mark.ci
async def test_keys() -> None:
    """Names without the keys around them are no use; those that have them are named."""
    rights = ("&*", "+@all")
    with EmbeddedServer(port=0) as server:
        env = await user(server, "~orders:*", *rights)
        assert told(server.url, "bad", "keys", **env) == "user 'locks' may use orders:*, but not all keys of a lock"
        env = await user(server, *rights)
        assert told(server.url, "bad", "keys", **env) == "user 'locks' may use no keys"
        found = examine(server.url, **await user(server, "~orders:*", "~{orders:*", "~cache:*", *rights))
        (keys,) = [one for one in found if one["check"] == "keys"]
        assert (keys["level"], keys["found"]) == ("ok", "user 'locks' may lock names like orders:*")


async def apply(server: EmbeddedServer, check: str, *words: str, **env: str) -> dict[str, Any]:
    """Do what the doctor advises about ``check``, word by word, and return what it then finds."""
    (found,) = [one for one in examine(server.url, *words, **env) if one["check"] == check]
    assert found["level"] in ("warn", "bad")
    fix = found["fix"].partition(" (")[0].split()
    assert fix[:3] == ["ACL", "SETUSER", "locks"]
    async with server.client() as client:
        made: Any = client
        await made.execute_command(*fix)
    (then,) = [one for one in examine(server.url, *words, **env) if one["check"] == check]
    return then


LOCKED = {
    "x": "x",
    "orders:*": "orders:42",
    "[ab]?x": "b-x",
    r"\*x": "*x",
    "orders:{*}": "orders:{42}",
    "{x}": "{x}",
    "{a": "a",
    "{orders:*": "orders:42",
    "a}b": "a}b",
    "": "orders:42",
}
"""A name that may be locked once the advice for a pattern was taken; "": no pattern."""


@pytest.mark.parametrize("pattern", first_of(*LOCKED))
async def test_the_doctor_is_content_with_the_keys_that_it_advises(pattern: str) -> None:
    """And it is right: such a name can be locked with them, and waited for."""
    with EmbeddedServer(port=0) as server:
        env = await user(server, *([f"~{pattern}"] if pattern else []), "&*", "+@all")
        assert (await apply(server, "keys", **env))["level"] == "ok"
        async with (
            server.client(username="locks", password=SECRET) as client,
            Coordinator(client) as sync,
            Coordinator(client) as other,
        ):
            lease = await sync.lock(LOCKED[pattern]).acquire()
            with pytest.raises(AcquireTimeout):
                await other.lock(LOCKED[pattern]).acquire(timeout=0.1)
            await lease.release()


@pytest.mark.ci
@pytest.mark.parametrize("pattern", ["app1:orders:*", "app1:{orders:4", "orders:*", ""])
async def test_the_keys_of_a_tenant(pattern: str) -> None:
    """All keys with its prefix are enough; the advice for fewer is about keys with the prefix."""
    with EmbeddedServer(port=0) as server:
        tenant = ("--prefix", "app1:")
        found = examine(server.url, *tenant, **await user(server, "~app1:*", "&*", "+@all"))
        (keys,) = [one for one in found if one["check"] == "keys"]
        assert (keys["level"], keys["found"]) == ("ok", "user 'locks' may use all keys that begin with app1:")
        env = await user(server, *([f"~{pattern}"] if pattern else []), "&*", "+@all")
        assert (await apply(server, "keys", *tenant, **env))["level"] == "ok"


@pytest.mark.ci
async def test_the_doctor_is_content_with_the_commands_that_it_advises() -> None:
    every = ("~*", "&*", "+@all")
    with EmbeddedServer(port=0) as server:
        for check, fewer in (
            ("scripts", ["-evalsha"]),
            ("commands", ["-zadd", "-pexpire"]),
            ("push", ["resetchannels"]),
        ):
            assert (await apply(server, check, **await user(server, *every, *fewer)))["level"] == "ok"


async def test_what_may_not_be_looked_at_is_said() -> None:
    """With the least rights that locks need, nothing crashes, and nothing is called ok that was not seen."""
    needed = "+evalsha +eval +subscribe +publish +get +set +del +pttl +pexpire +time +zadd +zrem +zrange +zscore +zcard"
    with EmbeddedServer(port=0) as server:
        found = examine(server.url, **await user(server, "~orders:*", "~{orders:*", "&rsa:*", "-@all", *needed.split()))
    seen = levels(found)
    hidden = ("version", "eviction", "persistence", "settings", "commands", "keys")
    assert {seen[check] for check in hidden} == {"unknown"}
    assert (seen["scripts"], seen["push"]) == ("ok", "ok")
    assert all("readable" in one["found"] for one in found if one["level"] == "unknown")

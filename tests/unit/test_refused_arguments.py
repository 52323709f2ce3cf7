"""What cannot be an argument is refused where it is given, and not later or never."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from redis.asyncio import Redis

from redis_sync_aio import Backoff, Coordinator, idempotent, once, once_per, wait_until
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.inspection import escape
from redis_sync_aio.instrumentation import observe_all
from redis_sync_aio.testing import freeze_renewals, lose, make_fixtures
from redis_sync_aio.testing.faults import FaultProxy, arg, command, script
from redis_sync_aio.testing.servers import ClusterTopology, IndependentServers, SentinelTopology

CLIENT = Redis()
REFUSED = (TypeError, ValueError)


async def coroutine_function(*_: Any) -> bool:
    return True


class Dumps:
    """Half a codec."""

    dumps = staticmethod(json.dumps)


def job(**options: Any) -> object:
    return once_per(CLIENT, "job", **options)


def request(name: Any = "key", **options: Any) -> object:
    return idempotent(CLIENT, name, **options)(coroutine_function)


Use = Callable[[Any], object]
JOBS: dict[str, tuple[Use, list[Any]]] = {
    "name": (lambda bad: once(CLIENT, bad), [None, "", 5, b"job"]),
    "keep": (lambda bad: once(CLIENT, "job", keep=bad), [None, 0, -1, math.nan, math.inf, "day", True]),
    "ttl": (lambda bad: once(CLIENT, "job", ttl=bad), [None, 0, math.nan, "long"]),
    "timeout": (lambda bad: once(CLIENT, "job", timeout=bad), [-1, math.nan, "long", True]),
    "on_crash": (lambda bad: once(CLIENT, "job", on_crash=bad), [None, "", "never"]),
    "client": (lambda bad: once(bad, "job"), [None, "redis://localhost", Redis, lambda: CLIENT]),
    "name of once_per": (lambda bad: once_per(CLIENT, bad), [None, "", 5, "{0!z}", "{now!z}", "{"]),
    "tz": (lambda bad: job(tz=bad), [None, "Europe/Berlin", timedelta(0)]),
    "keep of once_per": (lambda bad: job(keep=bad), [0, math.nan, "day"]),
    "ttl of once_per": (lambda bad: job(ttl=bad), [None, 0]),
    "timeout of once_per": (lambda bad: job(timeout=bad), [-1, "long"]),
    "on_crash of once_per": (lambda bad: job(on_crash=bad), [None, "never"]),
    "client of once_per": (lambda bad: once_per(bad, "job"), [None, Redis, coroutine_function, "redis://localhost"]),
    "function of once_per": (lambda bad: once_per(CLIENT, "job")(bad), [None, print, Redis]),
    "key": (request, [None, "", 5, b"key", "{missing}", "{_!z}"]),
    "codec": (lambda bad: request(codec=bad), [None, "json", Dumps(), print]),
    "fingerprint": (lambda bad: request(fingerprint=bad), ["", 5, "{missing}", "{"]),
    "client of idempotent": (lambda bad: idempotent(bad, "key"), [None, Redis, coroutine_function]),
    "function of idempotent": (lambda bad: idempotent(CLIENT, "key")(bad), [None, print, Redis]),
}
OTHERS: dict[str, tuple[Use, list[Any]]] = {
    "observe": (
        lambda bad: Coordinator(CLIENT, observe=bad),
        ["", b"", {}, 5, Redis, coroutine_function, [coroutine_function], [5]],
    ),
    "observer": (observe_all, [None, 5, "", [], Redis, coroutine_function]),
    "pattern_of": (lambda bad: observe_all(print, pattern_of=bad), [5, "", "user:*", str, coroutine_function]),
    "client_options": (lambda bad: Coordinator.from_url("redis://h", client_options=bad), ["", "x", 0, 5, [], print]),
    "jitter": (lambda bad: Backoff(jitter=bad), [None, 0, "yes"]),
    "random": (lambda bad: Backoff(random=bad), [None, 0.5, coroutine_function]),
    "escaped name": (escape, [None, b"name", 5]),
    "sleep": (lambda bad: Lock(CLIENT, "lock", sleep=bad), ["long", math.nan, []]),
    "blocking_timeout": (lambda bad: Lock(CLIENT, "lock", blocking_timeout=bad), ["long", math.nan, []]),
    "port": (lambda bad: EmbeddedServer(port=bad), ["", -1, 1.5, True]),
    "args": (lambda bad: EmbeddedServer(args=bad), [None, "--save", b"", 5, [5]]),
    "persistent": (lambda bad: EmbeddedServer(persistent=bad), [None, 1]),
    "start_timeout": (lambda bad: EmbeddedServer(start_timeout=bad), [None, 0, math.nan, "long"]),
    "servers": (IndependentServers, [None, 0, math.nan, "5", True]),
    "shards": (ClusterTopology, [None, 2, math.inf, "3", True]),
    "replicas": (lambda bad: ClusterTopology(3, bad), [None, 2, -1, True]),
    "bounds": (
        lambda bad: ClusterTopology(3, bounds=bad),
        [5, [0, 5, 16384], [0, 9, 5, 16384], [0, 5, 9, 16385], ["0", 5, 9, 16384]],
    ),
    "node_timeout": (lambda bad: ClusterTopology(node_timeout=bad), [0, math.nan, "long"]),
    "sentinels": (SentinelTopology, [None, 0, math.inf, "3"]),
    "group": (lambda bad: SentinelTopology(group=bad), [None, "", 5]),
    "down_after": (lambda bad: SentinelTopology(down_after=bad), [None, 0, "long"]),
    "tls": (lambda bad: FaultProxy("localhost", bad), ["", True, 5]),
    "predicate": (lambda bad: FaultProxy("localhost").on(bad, None), [None, 5, coroutine_function]),  # type: ignore[arg-type]
    "part": (arg, [None, "", b"", 5]),
    "command": (command, [None, "", 5]),
    "sha": (script, [None, "", 5]),
    "scope": (make_fixtures, [None, "", "test"]),
    "prefix": (lambda bad: make_fixtures(prefix=bad), [None, "", 5]),
    "options": (lambda bad: make_fixtures(client=bad), ["", 5, []]),
    "clean": (lambda bad: make_fixtures(clean=bad), [None, 1]),
}
CASES = [
    pytest.param(use, bad, id=f"{what}-{number}")
    for what, (use, values) in (JOBS | OTHERS).items()
    for number, bad in enumerate(values)
]


@pytest.mark.parametrize(("use", "bad"), CASES)
def test_a_bad_argument_is_refused_where_it_is_given(use: Use, bad: Any) -> None:
    with pytest.raises(REFUSED) as refused:
        use(bad)
    assert str(refused.value)


def test_frozen_renewals_are_no_decorator() -> None:
    """Over a coroutine function they would be frozen until it is called, and not while it runs."""
    decorate: Any = freeze_renewals(CLIENT)
    with pytest.raises(TypeError, match="not callable"):
        decorate(coroutine_function)


@pytest.mark.parametrize("bad", [None, 5, ""])
async def test_a_condition_is_a_function(bad: Any) -> None:
    with pytest.raises(TypeError, match="condition must be a function"):
        await wait_until(bad)


@pytest.mark.parametrize("bad", [None, 0.1, [0.1], ""])
async def test_pauses_are_a_backoff(bad: Any) -> None:
    with pytest.raises(TypeError, match="backoff must be a Backoff"):
        await wait_until(lambda: True, bad)


@pytest.mark.parametrize("bad", [None, "lease", 5])
async def test_what_is_lost_is_a_lease(bad: Any) -> None:
    with pytest.raises(TypeError, match="lease must be a lease"):
        await lose(bad)

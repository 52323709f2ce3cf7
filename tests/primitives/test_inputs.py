"""Inputs on a real server (E1, E2, E4): what is bad fails at the call and sends nothing; what is odd works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import pytest
import redis as redis_py
from redis.asyncio import Redis

from redis_sync_aio import AcquireTimeout, AsyncLock, Coordinator, Lease, LeaseLost, NotHeld, synchronized, wait_until
from redis_sync_aio.errors import CoordinatorClosed

from ..conftest import MakeClient
from ..support.body import FAST, for_ever, lost_in, waits
from ..support.inputs import BAD_IDENTITY, BAD_NAME, BAD_SECONDS, BAD_TTL, Table, nothing_sent
from ..support.inside import lock_keys
from ..support.views import holder_of

BAD_PERIOD: Table = {**BAD_SECONDS, "0": (0, ValueError)}


async def _function(user: int) -> None:
    """What `synchronized` decorates here."""


def _decorated(client: Any, name: Any = "x", **options: Any) -> object:
    return synchronized(client, name, **options)(_function)


Use = Callable[[Redis, AsyncLock, Any], object]

USES: Mapping[str, tuple[Use, Table]] = {
    "AsyncLock(name)": (lambda client, lock, bad: AsyncLock(client, bad), BAD_NAME),
    "AsyncLock(ttl)": (lambda client, lock, bad: AsyncLock(client, "x", ttl=bad), BAD_TTL),
    "AsyncLock(max_hold)": (lambda client, lock, bad: AsyncLock(client, "x", max_hold=bad), BAD_TTL),
    "AsyncLock(auto_renew)": (
        lambda client, lock, bad: AsyncLock(client, "x", auto_renew=bad),
        {"1": (1, TypeError), "none": (None, TypeError), "text": ("yes", TypeError)},
    ),
    "AsyncLock(on_lost)": (
        lambda client, lock, bad: AsyncLock(client, "x", on_lost=bad),
        {"ignore": ("ignore", ValueError), "none": (None, ValueError), "list": ([], ValueError)},
    ),
    "acquire(timeout)": (lambda client, lock, bad: lock.acquire(timeout=bad), BAD_SECONDS),
    "acquire(ttl)": (lambda client, lock, bad: lock.acquire(ttl=bad), BAD_TTL),
    "acquire(identity)": (lambda client, lock, bad: lock.acquire(identity=bad), BAD_IDENTITY),
    "try_acquire(ttl)": (lambda client, lock, bad: lock.try_acquire(ttl=bad), BAD_TTL),
    "try_acquire(identity)": (lambda client, lock, bad: lock.try_acquire(identity=bad), BAD_IDENTITY),
    "release(identity)": (lambda client, lock, bad: lock.release(identity=bad), BAD_IDENTITY),
    "Coordinator.lock(ttl)": (lambda client, lock, bad: Coordinator(client).lock("x", ttl=bad), BAD_TTL),
    "Coordinator.lock(name)": (lambda client, lock, bad: Coordinator(client).lock(bad), BAD_NAME),
    "Coordinator(push)": (
        lambda client, lock, bad: Coordinator(client, push=bad),
        {"sometimes": ("sometimes", ValueError), "none": (None, ValueError), "true": (True, ValueError)},
    ),
    "Coordinator(claim)": (lambda client, lock, bad: Coordinator(client, claim=bad), BAD_TTL),
    "Coordinator(retry_for)": (lambda client, lock, bad: Coordinator(client, retry_for=bad), BAD_PERIOD),
    "Coordinator(response_timeout)": (lambda client, lock, bad: Coordinator(client, response_timeout=bad), BAD_PERIOD),
    "synchronized(ttl)": (lambda client, lock, bad: _decorated(client, ttl=bad), BAD_TTL),
    "synchronized(timeout)": (lambda client, lock, bad: _decorated(client, timeout=bad), BAD_SECONDS),
    "synchronized(name)": (
        lambda client, lock, bad: _decorated(client, bad),
        {
            "empty": ("", ValueError),
            "none": (None, TypeError),
            "int": (5, TypeError),
            "bytes": (b"x", TypeError),
            "unknown": ("user:{nobody}", ValueError),
            "positional": ("user:{0}", ValueError),
            "anonymous": ("user:{}", ValueError),
            "not closed": ("user:{user", ValueError),
            "1 MB": ("x" * (1 << 20), ValueError),
        },
    ),
}  # fmt: skip
CASES = [
    pytest.param(use, value, error, id=f"{name}-{label}")
    for name, (use, table) in USES.items()
    for label, (value, error) in table.items()
]


@pytest.mark.parametrize(("use", "bad", "error"), CASES)
async def test_e2_a_bad_argument_fails_at_the_call_and_sends_nothing(
    redis: Redis, make_client: MakeClient, use: Use, bad: Any, error: type[Exception]
) -> None:
    client = make_client()
    lock = AsyncLock(client, "x")

    async def call() -> None:
        result = use(client, lock, bad)
        if isinstance(result, Awaitable):
            await result

    async with nothing_sent(redis):
        with pytest.raises(error) as caught:
            await call()
    assert type(caught.value) in (TypeError, ValueError, UnicodeEncodeError), "ours, not one from the depths"
    assert str(caught.value)


@pytest.mark.parametrize(("bad", "error"), BAD_TTL.values(), ids=BAD_TTL)
async def test_e2_a_bad_extension_leaves_the_lease_alone(sync: Coordinator, bad: Any, error: type[Exception]) -> None:
    async with sync.lock("x", ttl=20) as lease:
        before = lease.remaining()
        with pytest.raises(error, match="ttl"):
            await lease.extend(bad)
        assert 0 < lease.remaining() <= before
        lease.check()


CLIENTS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, r"expected a redis\.asyncio\.Redis"),
    "url": (lambda: "redis://localhost", r"for an address use Coordinator\.from_url"),
    "class": (lambda: Redis, r"expected a redis\.asyncio\.Redis"),
    "pool": (lambda: Redis().connection_pool, r"expected a redis\.asyncio\.Redis"),
    "synchronous": (lambda: redis_py.Redis(), r"synchronous client: pass a redis\.asyncio\.Redis"),
    "synchronous pipeline": (lambda: redis_py.Redis().pipeline(), r"synchronous client: pass a redis\.asyncio\.Redis"),
    "pipeline": (lambda: Redis().pipeline(), r"pass a redis\.asyncio\.Redis|expected a redis\.asyncio\.Redis"),
}


@pytest.mark.parametrize(("make", "advice"), CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize("use", [AsyncLock, synchronized, lambda client, name: Coordinator(client)],
                         ids=["AsyncLock", "synchronized", "Coordinator"])  # fmt: skip
async def test_e1_what_is_not_an_asyncio_client_is_told_what_to_pass(
    use: Callable[[Any, str], object], make: Callable[[], Any], advice: str
) -> None:
    with pytest.raises(TypeError, match=advice):
        use(make(), "x")


async def test_a_plain_function_can_not_be_synchronized(redis: Redis) -> None:
    """It would run, and only then the await of its result would fail."""
    ran: list[int] = []
    plain: Any = lambda: ran.append(1)  # noqa: E731
    with pytest.raises(TypeError):
        await synchronized(redis, "x")(plain)()
    assert not ran


# -- odd names -------------------------------------------------------------------------------------------

ODD: tuple[str | bytes, ...] = (
    "schl\u00fcssel \u2603", b"\xff\xfe\x00", b"a\r\nb", "{tag}", "a{tag}b", "{{}", "a:queue", "%d %s {x}", " ",
    "x" * 8192, "|", b"1|2|3|4",
)  # fmt: skip


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
async def test_e1_odd_names_work_from_end_to_end(redis: Redis, name: Any, push: Any) -> None:
    wire = name.encode() if isinstance(name, str) else name
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock(name)
        async with lock as lease:
            assert await redis.get(wire) == lease.token.encode()
            waiting = asyncio.create_task(lock.acquire(timeout=10))
            await wait_until(waits(lock), FAST, timeout=5)
            assert set(await redis.keys()) <= set(lock_keys(wire).all)
        async with asyncio.timeout(5):
            next_lease = await waiting
        assert next_lease.fence > lease.fence
        assert next_lease.name == lock.name
        await next_lease.release()
    assert await redis.keys() == [lock_keys(wire).fence]


@pytest.mark.parametrize("identity", ["worker 7", "schl\u00fcssel", b"\xff|\r\n %s", "x" * 5000, "{}", "0"], ids=ascii)
async def test_e1_odd_identities_work_from_end_to_end(sync: Coordinator, redis: Redis, identity: Any) -> None:
    lock = sync.lock("x")
    wire = identity.encode() if isinstance(identity, str) else identity
    lease = await lock.acquire(identity=identity)
    assert await redis.get("x") == wire
    assert holder_of(await lock.statistics()) == lease.identity == lease.token
    other = asyncio.create_task(lock.acquire(identity=wire + b"!", timeout=10))
    await wait_until(waits(lock), FAST, timeout=5)
    await lock.release(identity=identity)
    async with asyncio.timeout(5):
        assert (await other)._grant.wire_token == wire + b"!"
    with pytest.raises(NotHeld):
        await lock.release(identity=identity)
    await lock.release(identity=wire + b"!")


@pytest.mark.parametrize("way", ["by identity", "by lease"])
async def test_p6_a_release_ends_every_lease_of_that_identity_in_this_process(sync: Coordinator, way: str) -> None:
    """The same identity asking again gets the same lease again; so one release ends both, here and now."""
    lock = sync.lock("x")
    one = await lock.acquire(identity="worker")
    same = await lock.acquire(identity="worker")
    assert (same.fence, same.token) == (one.fence, one.token)
    await (lock.release(identity="worker") if way == "by identity" else one.release())
    async with lock:  # somebody else has it now
        for lease in (one, same):
            assert lease.remaining() == 0
            with pytest.raises((NotHeld, LeaseLost)):
                lease.check()


async def test_p1_a_name_and_the_same_name_in_braces_are_two_locks(sync: Coordinator) -> None:
    """`a` and `{a}` have two holders' keys, so they must not share a queue: a release of one served the other."""
    bare, braced = sync.lock("a"), sync.lock("{a}")
    released = await bare.acquire()
    async with braced as holder:
        waiting = asyncio.create_task(braced.acquire())
        await wait_until(waits(braced), FAST, timeout=5)
        await released.release()
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done(), f"two holders of {{a}}: {holder}, {waiting.result()}"
    await (await waiting).release()


# -- times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [timedelta(seconds=7), timedelta(milliseconds=7000), 7, 7.0])
async def test_a_ttl_may_be_a_timedelta(sync: Coordinator, redis: Redis, ttl: Any) -> None:
    for lease in (await sync.lock("x", ttl=ttl).acquire(), await sync.lock("y").acquire(ttl=ttl)):
        assert 6000 < await redis.pttl(lease.name) <= 7000
        await lease.extend(timedelta(seconds=3))
        assert 2000 < await redis.pttl(lease.name) <= 3000
        await lease.release()


async def test_a_ttl_is_rounded_up_to_a_whole_millisecond(sync: Coordinator) -> None:
    async with sync.lock("x", ttl=5.0001) as lease:
        assert lease._grant.ttl_ms == 5001


@pytest.mark.parametrize("ttl", [10 * 365 * 86_400, timedelta(days=3650), None], ids=str)
async def test_the_longest_ttls(sync: Coordinator, redis: Redis, ttl: Any) -> None:
    async with sync.lock("x", ttl=ttl) as lease:
        assert lease.remaining() > 1e8
        assert await redis.pttl("x") == -1 if ttl is None else await redis.pttl("x") > 3e11


@pytest.mark.parametrize("timeout", [1e9, 1e18, 1.7e308, timedelta.max, 10**300], ids=str)
@pytest.mark.parametrize("push", ["auto", "never"])
async def test_e2_a_huge_timeout_is_as_good_as_none(redis: Redis, timeout: Any, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        async with lock:
            waiting = asyncio.create_task(lock.acquire(timeout=timeout))
            await wait_until(waits(lock), FAST, timeout=5)
        async with asyncio.timeout(5):
            await (await waiting).release()
            async with lock.acquire(timeout=timeout):
                pass


@pytest.mark.parametrize("option", ["retry_for", "response_timeout"])
async def test_e2_huge_limits_of_a_coordinator_work(redis: Redis, option: str) -> None:
    options: dict[str, Any] = {option: 1.7e308}
    async with Coordinator(redis, **options) as sync, sync.lock("x") as lease, asyncio.timeout(5):
        assert lease.remaining() > 0
        assert await sync.lock("x").try_acquire() is None


@pytest.mark.parametrize("push", ["auto", "never"])
@pytest.mark.parametrize("timeout", [0, 0.0, -0.0, timedelta(0)], ids=repr)
async def test_timeout_0_takes_what_is_free_and_never_waits_or_queues(redis: Redis, timeout: Any, push: Any) -> None:
    async with Coordinator(redis, push=push) as sync:
        lock = sync.lock("x")
        async with lock.acquire(timeout=timeout):
            with pytest.raises(AcquireTimeout, match="'x' is taken"):
                await lock.acquire(timeout=timeout)
            with pytest.raises(TimeoutError):
                async with lock.acquire(timeout=timeout):
                    pytest.fail("entered")
            assert (await lock.statistics()).waiting == 0
        lease = await lock.acquire(timeout=timeout)
        await lease.release()


async def test_a_tiny_timeout_withdraws_its_request(sync: Coordinator) -> None:
    lock = sync.lock("x")
    lease = await lock.acquire()
    for timeout in (5e-324, 1e-9, 0.001):
        with pytest.raises((AcquireTimeout, ConnectionError, redis_py.ConnectionError)):
            await lock.acquire(timeout=timeout)
    await wait_until(waits(lock, 0), FAST, timeout=5)
    await lease.release()


# -- a client that is closed meanwhile (E4) ----------------------------------------------------------------


def tasks_of_ours() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if "redis_sync_aio" in task.get_name()]


@pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "implicit"])
async def test_e4_closing_the_client_ends_waits_and_leases_with_clear_errors(
    redis: Redis, make_client: MakeClient, explicit: bool
) -> None:
    client = make_client()
    lock = AsyncLock(Coordinator(client) if explicit else client, "x")

    async def close(_: Lease) -> None:
        waiting = asyncio.create_task(lock.acquire())
        await wait_until(waits(AsyncLock(redis, "x")), FAST, timeout=5)
        await client.aclose()
        async with asyncio.timeout(5):
            with pytest.raises(CoordinatorClosed, match="client was closed"):
                await waiting
        await for_ever()

    _, lost = await lost_in(lock.acquire(), close)
    assert lost.reason == "closed"
    if explicit:
        with pytest.raises(CoordinatorClosed, match="create a new"):
            await lock.acquire()
        with pytest.raises(CoordinatorClosed):
            await lock.statistics()
    await wait_until(lambda: not tasks_of_ours(), FAST, timeout=5)
    assert holder_of(await AsyncLock(redis, "x").statistics()) is None, "given back"


async def test_e4_a_closed_coordinator_refuses_and_sends_nothing(redis: Redis, make_client: MakeClient) -> None:
    coordinator = Coordinator(make_client())
    lock = coordinator.lock("x")
    lease = await lock.acquire()
    await coordinator.aclose()
    await redis.flushall()
    async with nothing_sent(redis):
        uses: list[Callable[[], Awaitable[object]]] = [
            lock.acquire, lock.try_acquire, lock.statistics, lock.locked, lock.release, lock.force_release,
            lock.acquire().__aenter__, lock.__aenter__, coordinator.__aenter__,
        ]  # fmt: skip
        for use in uses:
            with pytest.raises(CoordinatorClosed, match="cannot be used any more"):
                await use()
        with pytest.raises(LeaseLost, match="closed"):
            await lease.extend(5)
        with pytest.raises(LeaseLost, match="closed"):
            await lease.release()
        await coordinator.aclose()


@pytest.mark.parametrize("engine", ["lua", "watch"])
async def test_p1_a_name_that_ends_like_an_engine_is_another_lock(
    redis: Redis, sync: Coordinator, engine: Literal["lua", "watch"]
) -> None:
    async with Coordinator(redis) as other, sync.lock(f"x {engine}"):
        lease = await other.lock("x").acquire()
        with pytest.raises(AcquireTimeout):
            await AsyncLock(sync, "x", engine=engine).acquire(timeout=0.05)
        await lease.release()

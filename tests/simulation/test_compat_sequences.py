"""Random sequences of operations on `redis_sync_aio.compat.Lock` and on redis-py's own lock, compared after each step.

Each sequence runs twice, in two databases: one to three lock objects over two names, used by the main task, by two
tasks that live on, by a task that ends, and by another thread with a loop of its own. In between keys are deleted,
overwritten and prolonged, and attributes are changed. Compared are what comes back (or the error and its message), the
key with its token and its ttl, and the token on the object. Where the two differ on purpose is in `DIFFERENCES`, each
with its line in docs/migration/redis-py.md; behind such a difference the states are not the same: the sequence ends.

    python -m pytest tests/simulation/test_compat_sequences.py --comparisons=3000 --comparisons-seed=7
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.asyncio.lock import Lock as RedisLock
from redis.exceptions import LockNotOwnedError

from redis_sync_aio import wait_until
from redis_sync_aio.compat import Lock
from redis_sync_aio.embedded import EmbeddedServer

from ..support.body import FAST
from ..support.inside import close_implicit
from ..support.options import OPTIONS

COMPARISONS = OPTIONS.comparisons or 60
SEED = OPTIONS.comparisons_seed
TOLERANCE_MS = 5_000
"""So much of a ttl may have passed in one run and not in the other. All ttls are further apart, and longer."""
NAMES = ("one", "two")
TASKS = ("main", "first", "second")
"""Tasks that live on; "passing" is one that ends, "thread" one in another thread."""
FOREIGN = b"somebody else"

Step: TypeAlias = tuple[Any, ...]
Outcome: TypeAlias = tuple[str, Any, str]
Operation: TypeAlias = Callable[[RedisLock], Awaitable[object]]


class BodyError(Exception):
    """What a body raises by itself."""


async def enter(lock: RedisLock, client: Any, inside: str) -> bool:
    """Use the lock as a context manager."""
    async with lock:
        if inside == "lost":
            await client.delete(str(lock.name))
        elif inside == "released":
            await lock.release()
        elif inside == "raises":
            raise BodyError
    return True


SECONDS = st.sampled_from([20, 40.5, Decimal("60"), Fraction(80)])
ACQUIRE = st.fixed_dictionaries(
    {},
    optional={
        "blocking": st.booleans(),
        "blocking_timeout": st.sampled_from([0, 0.01, -1]) | st.just(Fraction(1, 100)),
        "token": st.sampled_from(["x", b"x", "y", "ü"]),
    },
)
MORE = st.sampled_from([20, 40.5, Decimal("60"), Fraction(80), 0, -5, -500])
ACQUIRED = st.tuples(st.just("acquire"), ACQUIRE)
EXTENDED = st.tuples(st.just("extend"), MORE, st.booleans())
CALLS = st.one_of(
    ACQUIRED,
    EXTENDED,
    st.tuples(st.just("release")),
    st.tuples(st.sampled_from(["reacquire", "owned", "locked"])),
    st.tuples(st.just("enter"), st.sampled_from(["", "lost", "released", "raises"])),
)
NUMBER = st.integers(0, 2)
ANYBODY = st.sampled_from([*TASKS, "main", "passing", "thread"])
STEPS = st.one_of(
    st.tuples(st.just("call"), ANYBODY, NUMBER, CALLS),
    st.tuples(st.just("call"), ANYBODY, NUMBER, ACQUIRED),
    st.tuples(st.just("call"), st.just("main"), NUMBER, CALLS),
    st.tuples(st.just("call"), st.just("main"), st.just(0), ACQUIRED),
    st.tuples(st.just("call"), st.just("main"), st.just(0), EXTENDED),
    st.tuples(st.just("key"), st.sampled_from(NAMES), st.sampled_from(["delete", "foreign", "prolong", "persist"])),
    st.tuples(st.just("hand on"), st.sampled_from(NAMES), NUMBER),
    st.tuples(st.just("set"), NUMBER, st.just("timeout"), SECONDS | st.none() | st.just(0)),
    st.tuples(st.just("set"), NUMBER, st.just("name"), st.sampled_from(NAMES)),
    st.tuples(st.just("token"), NUMBER, NUMBER | st.none() | st.just(b"x")),
)
LOCKS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(NAMES),
        "timeout": SECONDS | SECONDS | SECONDS | st.none(),
        "blocking_timeout": st.sampled_from([0, 0.01]),
        "thread_local": st.booleans(),
        "raise_on_release_error": st.booleans(),
    }
)
CLIENTS = st.fixed_dictionaries({"protocol": st.sampled_from([2, 3]), "decode_responses": st.booleans()})


class Living:
    """A task that runs what it is given, until the end."""

    def __init__(self) -> None:
        self._given: asyncio.Queue[tuple[Awaitable[Outcome], asyncio.Future[Outcome]]] = asyncio.Queue()
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while True:
            work, outcome = await self._given.get()
            outcome.set_result(await work)

    async def run(self, work: Awaitable[Outcome]) -> Outcome:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._given.put_nowait((work, outcome))
        return await outcome


class Thread:
    """Another thread, with a loop that lives on between two runs."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._runner = asyncio.Runner()

    async def run(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._runner.run, work)

    def close(self) -> None:
        self._executor.submit(self._runner.close).result()
        self._executor.shutdown()


@dataclass
class World:
    """One of the two: lock objects, and who uses them."""

    client: Redis
    abroad: Redis
    """A client for the other thread."""
    thread: Thread
    locks: list[RedisLock]
    tasks: dict[str, Living] = field(default_factory=dict)
    seen: dict[bytes, int] = field(default_factory=dict)
    """Tokens, numbered as they appear: random ones can be compared by that only."""

    async def call(self, who: str, lock: RedisLock, call: Step) -> Outcome:
        work = self._outcome(lock, call)
        if who == "passing":
            return await asyncio.create_task(work)
        if who == "thread":
            lock.redis = self.abroad
            try:
                outcome: Outcome = await self.thread.run(work)
            finally:
                lock.redis = self.client
            return outcome
        return await (work if who == "main" else self.tasks[who].run(work))

    async def _outcome(self, lock: RedisLock, call: Step) -> Outcome:
        try:
            if call[0] == "enter":
                return "returned", await enter(lock, lock.redis, call[1]), ""
            if call[0] == "acquire":
                return "returned", await lock.acquire(**call[1]), ""
            return "returned", await getattr(lock, call[0])(*call[1:]), ""
        except Exception as error:
            return "raised", type(error).__name__, str(error)

    async def key(self, name: str, what: str) -> None:
        if what == "delete":
            await self.client.delete(name)
        elif what == "foreign":
            await self.client.set(name, FOREIGN, px=100_000)
        elif what == "prolong":
            await self.client.pexpire(name, 150_000)
        else:
            await self.client.persist(name)

    async def unqueued(self) -> bool:
        """Whether each request that gave up was withdrawn: until then a release may hand the lock over to it."""
        return not await self.client.exists(*(f"{{{name}}}:queue" for name in NAMES))

    async def state(self) -> list[Any]:
        raw = [await self.client.execute_command("GET", name, NEVER_DECODE=True) for name in NAMES]  # type: ignore[no-untyped-call]
        ttls = [await self.client.pttl(name) for name in NAMES]
        return [*map(self._shown, raw), *(self._shown(lock.local.token) for lock in self.locks), ttls]

    def _shown(self, token: bytes | None) -> object:
        return token if token in (None, b"x", b"y", FOREIGN) else self.seen.setdefault(token or b"", len(self.seen))


@dataclass
class Acquired:
    """What the tasks that live on acquired through one lock object, as `compat.Lock` is to remember it."""

    tokens: dict[str, bytes] = field(default_factory=dict)
    latest: str = ""

    def told(self, who: str, call: Step, before: bytes | None, lock: RedisLock, outcome: Outcome) -> None:
        """Take note of a call; ``before`` is the object's token before it."""
        if call[0] == "acquire" and outcome[1] is True:
            self.latest, self.tokens[who] = who, lock.local.token
        elif call == ("enter", "lost") and "Unable to acquire" not in outcome[2]:
            self.latest, self.tokens[who] = who, b"lost"
        elif call[0] == "release" and outcome[0] == "returned":
            self.tokens = {task: token for task, token in self.tokens.items() if token != before}

    def stale(self, who: str, lock: RedisLock) -> bool:
        """Whether ``who`` lost what it acquired, and another task holds the lock through the object."""
        return self.latest != who and self.tokens.get(who, lock.local.token) != lock.local.token


# -- differences that are meant, and in docs/migration/redis-py.md -----------------------------------------------------


def _no_timeout(call: Step, lock: RedisLock, stock: Outcome, ours: Outcome) -> bool:
    return lock.timeout == 0 and call[0] in ("extend", "reacquire") and "with no timeout" in ours[2]


def _another_thread(call: Step, lock: RedisLock, stock: Outcome, ours: Outcome) -> bool:
    """redis-py: AttributeError, in a thread that has acquired nothing."""
    return "no attribute 'token'" in stock[2] and (ours[1] is False or "LockError" in str(ours[1]))


def _body_error(call: Step, lock: RedisLock, stock: Outcome, ours: Outcome) -> bool:
    return call == ("enter", "raises") and ours[1] == "BodyError" and stock[1] in ("LockError", "LockNotOwnedError")


def _without_ttl(call: Step, lock: RedisLock, stock: Outcome, ours: Outcome) -> bool:
    return call[0] == "extend" and call[2] and ours[1] is True and stock[1] == "LockNotOwnedError"


DIFFERENCES = (_no_timeout, _another_thread, _body_error, _without_ttl)


# -- the comparison ----------------------------------------------------------------------------------------


def alike(stock: list[Any], ours: list[Any]) -> bool:
    """Whether two states are the same, but for what time has passed."""
    *stock, stock_ttls = stock
    *ours, our_ttls = ours
    near = all(
        a == b if min(a, b) < 0 else abs(a - b) < TOLERANCE_MS for a, b in zip(stock_ttls, our_ttls, strict=True)
    )
    return stock == ours and near


async def step(stock: World, ours: World, known: list[Acquired], it: Step) -> bool:
    """Do one step in both worlds and compare; return whether to go on."""
    number = next(part for part in it if type(part) is int) % len(ours.locks) if it[0] != "key" else 0
    lock, acquired = ours.locks[number], known[number]
    if it[0] == "call":
        _, who, _, call = it
        before, stale = lock.local.token, acquired.stale(who, lock)
        theirs = await stock.call(who, stock.locks[number], call)
        outcome = await ours.call(who, lock, call)
        await wait_until(ours.unqueued, FAST, timeout=60)
        note(f"{it}: {theirs} | {outcome}")
        acquired.told(who, call, before, lock, outcome)
        if theirs != outcome:
            meant = stale or any(differ(call, lock, theirs, outcome) for differ in DIFFERENCES)
            assert meant, f"{it}: redis-py {theirs}, ours {outcome}"
            return False
    else:
        for world in (stock, ours):
            await outside(world, world.locks[number], it)
    one, other = await stock.state(), await ours.state()
    assert alike(one, other), f"after {it}: redis-py {one}, ours {other}"
    return True


async def outside(world: World, lock: RedisLock, it: Step) -> None:
    """What is done to the keys and to the attributes."""
    if it[0] == "key":
        await world.key(it[1], it[2])
    elif it[0] == "hand on" and lock.local.token is not None:
        await world.client.set(it[1], lock.local.token, px=100_000)
    elif it[0] == "set":
        setattr(lock, it[2], it[3])
    elif it[0] == "token":
        given = world.locks[it[2] % len(world.locks)].local.token if isinstance(it[2], int) else it[2]
        lock.local.token = given


class Arena:
    """Clients, a loop and a thread that all sequences use."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self.runner = asyncio.Runner()
        self._thread = Thread()
        self._clients: dict[tuple[object, ...], Redis] = {}

    def _client(self, *key: Any) -> Redis:
        if key not in self._clients:
            db, _, protocol, decode = key
            self._clients[key] = Redis(
                host=self._server.host, port=self._server.port or 0,
                db=db, protocol=protocol, decode_responses=decode,
            )  # fmt: skip
        return self._clients[key]

    async def _world(self, db: int, kind: type[RedisLock], options: dict[str, Any], locks: list[Any]) -> World:
        client, abroad = (
            self._client(db, where, options["protocol"], options["decode_responses"]) for where in ("here", "abroad")
        )
        await client.flushdb()
        made = [kind(client, sleep=0.004, **lock) for lock in locks]
        return World(client, abroad, self._thread, made, {name: Living() for name in TASKS[1:]})

    async def compare(
        self, kind: type[RedisLock], options: dict[str, Any], locks: list[dict[str, Any]], steps: list[Step]
    ) -> bool:
        """Do the steps in both worlds, to the end or to a difference that is meant; return whether to the end."""
        stock = await self._world(1, RedisLock, options, locks)
        ours = await self._world(2, kind, options, locks)
        known = [Acquired() for _ in locks]
        try:
            for it in steps:
                if not await step(stock, ours, known, it):
                    return False
            return True
        finally:
            for living in (*stock.tasks.values(), *ours.tasks.values()):
                living.task.cancel()

    def close(self) -> None:
        async def close(where: str) -> None:
            for (db, place, *_), client in self._clients.items():
                if place == where:
                    if db == 2:
                        await close_implicit(client)
                    await client.aclose()

        async def both() -> None:
            await self._thread.run(close("abroad"))
            await close("here")

        self.runner.run(both())
        self._thread.close()
        self.runner.close()


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with EmbeddedServer(port=0) as server:
        arena = Arena(server)
        yield arena
        arena.close()


PROFILE = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    max_examples=COMPARISONS,
)
SEQUENCES = (CLIENTS, st.lists(LOCKS, min_size=1, max_size=3), st.lists(STEPS, min_size=5, max_size=20))


def compare(arena: Arena, kind: type[RedisLock], profile: settings) -> list[bool]:
    """Compare so many sequences; return of each whether it came to its end."""
    ended: list[bool] = []

    @seed(SEED)
    @profile
    @given(*SEQUENCES)
    def compared(options: dict[str, Any], locks: list[dict[str, Any]], steps: list[Step]) -> None:
        ended.append(arena.runner.run(arena.compare(kind, options, locks, steps)))

    compared()
    return ended


@pytest.mark.timeout(900)
def test_sequences_agree_with_redis_py(arena: Arena) -> None:
    ended = compare(arena, Lock, PROFILE)
    assert sum(ended) > 0.7 * COMPARISONS, "most of them are compared to the end"


class KeepsToken(Lock):
    """It remembers what it has released."""

    async def release(self) -> None:
        token = self.local.token
        await super().release()
        self.local.token = token


class KeepsTtl(Lock):
    """It extends by nothing."""

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Awaitable[Literal[True]]:
        return super().extend(additional_time if replace_ttl else 0)


class SaysNothing(Lock):
    """It does not say that the lock was lost."""

    async def release(self) -> None:
        with suppress(LockNotOwnedError):
            await super().release()


@pytest.mark.parametrize("wrong", [KeepsToken, KeepsTtl, SaysNothing])
@pytest.mark.ci
def test_the_comparison_notices_a_difference(arena: Arena, wrong: type[Lock]) -> None:
    first = settings(PROFILE, max_examples=100, phases=[Phase.generate], print_blob=False)
    with pytest.raises(AssertionError, match="redis-py"):
        compare(arena, wrong, first)

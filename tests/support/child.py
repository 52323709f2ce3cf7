"""A process of its own that uses locks, and may be killed or stopped while it does.

    with Crew() as crew, crew.child() as child:       # `with`: what is left is killed
        await child.open(server.url, claim=0.3)
        grant = await child.acquire("name", ttl=5)
        child.stop(); child.go_on(); child.kill()

It is driven by lines on its standard input, ``ID VERB ARGUMENT…``, and answers each by one line of JSON
on its standard output. Times are `time.monotonic_ns`, which all processes of a machine share. The child dies
with its parent: at the end of its input, and on Linux also when it is stopped then.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from redis.asyncio import Redis

ROOT = Path(__file__).parents[2]


class Failed(Exception):
    """The child answered with an error: ``kind`` is the name of its class."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.kind: str = answer["error"]


class Answer:
    """What the child answered; ``at`` is when, in seconds of the monotonic clock."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.at: float = fields["at"] / 1e9
        self.fields = fields

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def fence(self) -> int:
        return int(self.fields["fence"])

    @property
    def token(self) -> bytes:
        return str(self.fields["token"]).encode()


def name_of(pid: int) -> str:
    """Return the name of a child's connections."""
    return f"child-{pid}"


class Child:
    """The parent's side. The process may serve several tests, one after the other: see `Crew`."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-X", "dev", "-W", "error", "-m", __name__]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True,
            env=os.environ | (environment or {}),
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._rest = b""
        self.stopped = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def attach(self) -> None:
        """Listen, in the running event loop."""
        assert self.process.stdout is not None
        asyncio.get_running_loop().add_reader(self.process.stdout.fileno(), self._read)

    def detach(self) -> None:
        """Listen no more."""
        assert self.process.stdout is not None
        asyncio.get_running_loop().remove_reader(self.process.stdout.fileno())
        for asked in self._asked.values():
            asked.cancel()
        self._asked.clear()

    def _read(self) -> None:
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            self.detach()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            asked = self._asked.pop(fields["id"], None)
            if asked is None or asked.done():
                continue
            if "error" in fields:
                asked.set_exception(Failed(fields))
                asked.exception()  # the task that asked may be gone
            else:
                asked.set_result(Answer(fields))

    def ask(self, *words: object) -> asyncio.Future[Answer]:
        """Send a command now; the future is its answer."""
        assert self.process.stdin is not None
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(" ".join(map(str, (number, *words))).encode() + b"\n")
        return answer

    async def open(self, url: str, *, claim: float | None = 2.0) -> None:
        """Make a client and a coordinator, and connect. ``claim``: None for the coordinator's default."""
        await self.ask("open", url, "default" if claim is None else claim)

    def acquire(self, name: str, ttl: float, slot: str = "it", identity: str = "") -> asyncio.Future[Answer]:
        """Acquire (token, fence, remaining), to be released as ``slot``."""
        return self.ask("acquire", slot, name, ttl, *([identity] if identity else []))

    def permits(
        self, name: str, ttl: float, weight: int, limit: int, slot: str = "it", identity: str = ""
    ) -> asyncio.Future[Answer]:
        """Acquire permits of a semaphore; otherwise as `acquire`."""
        return self.ask("permits", slot, name, ttl, weight, limit, *([identity] if identity else []))

    def robust(self, name: str, ttl: float, slot: str = "it") -> asyncio.Future[Answer]:
        """Acquire a robust lock (also: abandoned, the fence of who left it, or None); otherwise as `acquire`."""
        return self.ask("robust", slot, name, ttl)

    def record(self, progress: object, slot: str = "it") -> asyncio.Future[Answer]:
        """Record progress under a robust lock."""
        return self.ask("record", slot, json.dumps(progress, separators=(",", ":")))

    def release(self, slot: str = "it") -> asyncio.Future[Answer]:
        return self.ask("release", slot)

    def release_as(self, name: str, identity: str) -> asyncio.Future[Answer]:
        """Release the lock that ``identity`` holds, wherever it was acquired."""
        return self.ask("release_as", name, identity)

    def run(self, job: str, *words: object) -> asyncio.Future[Answer]:
        """Run ``await module.function(sync, *words)``, called ``module:function``; its answer is a dict."""
        return self.ask("run", job, *words)

    # -- what the operating system does to it ----------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL; return when it is gone."""
        self.process.kill()
        self.process.wait()
        self.stopped = False

    async def kill_seen(self, observer: Redis) -> None:
        """SIGKILL; return when the server has seen that it is gone.

        Between the two the server takes it for alive: what is handed over to it is its own until its claim ends.
        """
        self.kill()
        while any(one["name"] == name_of(self.process.pid) for one in await observer.client_list()):
            await asyncio.sleep(0.001)

    def stop(self) -> None:
        """SIGSTOP; return when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Return when it stands still, whatever stopped it."""
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), "it died instead"
        self.stopped = True

    def stands_still(self) -> bool:
        """Return whether it stopped since it was last asked."""
        pid, status = os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            assert os.WIFSTOPPED(status), "it died instead"
            self.stopped = True
        return bool(pid)

    def go_on(self) -> float:
        """SIGCONT; return when that was, by the clock of `Answer.at`."""
        self.stopped = False
        at = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        return at

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Crew:
    """Children that survive a test are used again by the next: starting Python takes longest."""

    def __init__(self) -> None:
        self._spare: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._spare:
            child.end()

    @contextmanager
    def children(self, count: int) -> Iterator[list[Child]]:
        """``count`` children for this test. They start at the same time."""
        used = [self._spare.pop() if self._spare else Child() for _ in range(count)]
        try:
            for child in used:
                child.attach()
            yield used
        except BaseException:
            for child in used:
                child.kill()
            raise
        finally:
            for child in used:
                if child.alive:
                    child.detach()
                    if child.stopped:
                        child.go_on()
                    child.ask("close")  # nobody listens; done before its next `open`
                    self._spare.append(child)
                else:
                    child.detach()
                    child.end()


# -- the child's side --------------------------------------------------------------------------------------


class Worker:
    """Does what the lines say. Every line is a task, so a waiting one holds nobody up."""

    def __init__(self) -> None:

        from redis_sync_aio import Coordinator, Lease

        self.client: Redis
        self.sync: Coordinator | None = None
        self.leases: dict[str, Lease] = {}
        self.bodies: dict[str, asyncio.Task[dict[str, object]]] = {}
        self.leave: dict[str, asyncio.Event] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        asyncio.get_running_loop().slow_callback_duration = 60
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            number, verb, *words = line.decode().split()
            if verb in ("open", "close"):
                await self.close()  # before the next line is read
            task = asyncio.create_task(self.answer(int(number), verb, words))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        os._exit(0)

    async def answer(self, number: int, verb: str, words: list[str]) -> None:
        try:
            fields: dict[str, object] = await getattr(self, "do_" + verb)(*words)
        except asyncio.CancelledError:
            fields = {"error": "CancelledError", "message": ""}
        except Exception as error:
            fields = {"error": type(error).__name__, "message": str(error)}
        fields.setdefault("at", time.monotonic_ns())
        os.write(1, json.dumps({"id": number, **fields}).encode() + b"\n")

    async def do_open(self, url: str, claim: str) -> dict[str, object]:
        from redis.asyncio import Redis

        from redis_sync_aio import AsyncLock, Coordinator

        self.client = Redis.from_url(url, client_name=name_of(os.getpid()))
        self.sync = Coordinator(self.client) if claim == "default" else Coordinator(self.client, claim=float(claim))
        await AsyncLock(self.sync, "connected?").locked()
        return {}

    async def do_close(self) -> dict[str, object]:
        return {}

    async def close(self) -> None:
        tasks = [*self.tasks, *self.bodies.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.sync is not None:
            await self.sync.aclose()
            await self.client.aclose()
        self.sync = None
        self.leases.clear()
        self.bodies.clear()

    def lock(self, name: str, ttl: str) -> Any:
        assert self.sync is not None
        return self.sync.lock(name, ttl=float(ttl))

    async def do_acquire(self, slot: str, name: str, ttl: str, identity: str | None = None) -> dict[str, object]:
        return self.acquired(slot, await self.lock(name, ttl).acquire(identity=identity))

    async def do_permits(
        self, slot: str, name: str, ttl: str, weight: str, limit: str, identity: str | None = None
    ) -> dict[str, object]:
        from redis_sync_aio import AsyncSemaphore

        assert self.sync is not None
        semaphore = AsyncSemaphore(self.sync, name, limit=int(limit), ttl=float(ttl))
        return self.acquired(slot, await semaphore.acquire(weight=int(weight), identity=identity))

    async def do_robust(self, slot: str, name: str, ttl: str) -> dict[str, object]:
        from redis_sync_aio import AsyncRobustLock

        assert self.sync is not None
        lease = await AsyncRobustLock(self.sync, name, ttl=float(ttl)).acquire()
        found = self.acquired(slot, lease)
        return {**found, "abandoned": lease.abandoned.fence if lease.abandoned else None}

    async def do_record(self, slot: str, progress: str) -> dict[str, object]:
        lease: Any = self.leases[slot]  # of a robust lock
        await lease.record(json.loads(progress))
        return {}

    def acquired(self, slot: str, lease: Any) -> dict[str, object]:
        self.leases[slot] = lease
        at = time.monotonic_ns()
        return {"token": lease.token, "fence": lease.fence, "remaining": lease.remaining(), "at": at}

    async def do_body(self, slot: str, name: str, ttl: str) -> dict[str, object]:
        """Enter ``async with``; the body ends by itself when it is told to `leave`."""
        entered: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self.leave[slot] = asyncio.Event()
        self.bodies[slot] = asyncio.create_task(self.body(slot, self.lock(name, ttl), entered))
        return await entered

    async def body(self, slot: str, lock: Any, entered: asyncio.Future[dict[str, object]]) -> dict[str, object]:
        cancelled_at, raised = 0, ""
        try:
            async with lock as lease:
                self.leases[slot] = lease
                entered.set_result({"token": lease.token, "fence": lease.fence})
                try:
                    await self.leave[slot].wait()
                except asyncio.CancelledError:
                    cancelled_at = time.monotonic_ns()
                    raise
        except Exception as error:
            raised = type(error).__name__
        return {"raised": raised, "cancelled_at": cancelled_at / 1e9}

    async def do_leave(self, slot: str) -> dict[str, object]:
        self.leave[slot].set()
        return await self.do_ended(slot)

    async def do_ended(self, slot: str) -> dict[str, object]:
        """Wait until the body has ended."""
        return await asyncio.shield(self.bodies[slot])

    async def do_release(self, slot: str) -> dict[str, object]:
        await self.leases[slot].release()
        return {}

    async def do_release_as(self, name: str, identity: str) -> dict[str, object]:
        await self.lock(name, "30").release(identity=identity)
        return {}

    async def do_run(self, job: str, *words: str) -> dict[str, object]:
        module, name = job.split(":")
        found: dict[str, object] = await getattr(importlib.import_module(module), name)(self.sync, *words)
        return found

    async def do_check(self, slot: str) -> dict[str, object]:
        self.leases[slot].check()
        return {}

    async def do_lease(self, slot: str) -> dict[str, object]:
        lease = self.leases[slot]
        return {"lost": lease.lost, "remaining": lease.remaining(), "fence": lease.fence}

    async def do_wall(self) -> dict[str, object]:
        """Tell the time of the wall clock."""
        return {"wall": time.time()}

    async def do_stop(self, slot: str) -> dict[str, object]:
        """Stop ourselves in the middle of a turn; say whether the lease was known to be lost right then."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return {"lost": self.leases[slot].lost}

    async def do_late(self, name: str, key: str, ttl: str, guarded: str) -> dict[str, object]:
        """Count ``key`` up under a lock, but stop ourselves after the last check of the lease, before the write."""
        from redis_sync_aio import AsyncLock

        assert self.sync is not None
        lease = await AsyncLock(self.sync, name, ttl=float(ttl), auto_renew=False).acquire()
        if guarded == "guarded":
            async with lease.transaction() as tx:
                count = int(await tx.get(key) or 0)
                tx.multi()
                tx.set(key, count + 1)
                execute = tx._session.execute

                async def late(queue: Any) -> Any:
                    os.kill(os.getpid(), signal.SIGSTOP)
                    return await execute(queue)

                tx._session.__dict__["execute"] = late
        else:
            count = int(await self.client.get(key) or 0)
            lease.check()
            os.kill(os.getpid(), signal.SIGSTOP)
            await self.client.set(key, count + 1)
        return {}

    async def do_count(self, key: str, tasks: str, times: str, after: str) -> dict[str, object]:
        """Count ``key`` up in transactions, tasks x times; by turns ``after`` conflicts (0: never)."""
        from redis_sync_aio import transaction
        from redis_sync_aio.types import Transaction

        assert self.sync is not None
        sync, client, conflicts, escalated = self.sync, self.client, 0, 0
        disturbed = max(1, int(after))  # so many attempts of each meet a conflict, however slow the machine is

        async def one() -> None:
            nonlocal conflicts, escalated
            attempts = 0

            async def body(tx: Transaction) -> None:
                nonlocal attempts
                attempts += 1
                count = int(await tx.get(key) or 0)
                if attempts <= disturbed:
                    await client.incrby(key, 0)  # a write, which leaves the value
                tx.multi()
                tx.set(key, count + 1)

            for _ in range(int(times)):
                done = await transaction(sync, body, key, attempts=100_000, escalate_after=int(after) or None)
                conflicts += done.conflicts
                escalated += done.escalated

        await asyncio.gather(*(one() for _ in range(int(tasks))))
        return {"conflicts": conflicts, "escalated": escalated}

    async def do_die(self, slot: str) -> dict[str, object]:
        """Kill ourselves in the middle of a turn, inside the section."""
        self.leases[slot].check()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


if __name__ == "__main__":
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    asyncio.run(Worker().run())

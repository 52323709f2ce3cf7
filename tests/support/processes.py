"""Other processes: scenes that a test plays, and a crew of children that use locks and may be killed or stopped.

    play(scene, server.url, "how")                    # a function, from its beginning to its end

    with Crew() as crew, crew.children(1) as (child,):       # `with`: what is left is killed
        await child.open(server.url, claim=0.3)
        grant = await child.acquire("name", ttl=5)
        child.stop(); child.go_on(); child.kill()

A child is driven by lines on its standard input, ``ID VERB ARGUMENT…``, and answers each by one line of JSON
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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

from redis.asyncio import Redis

from redis_sync_aio import AsyncLock, AsyncRobustLock, Coordinator

from .programs import ROOT

Scene: TypeAlias = Callable[[str, str], None]
"""Runs in a process of its own, with an address and a word of how; it prints a line at its end."""
Job: TypeAlias = Callable[..., Awaitable[dict[str, object]]]
"""Runs in a child, with its coordinator and words."""


def play(scene: Scene, address: str, how: str = "", *, warnings: str = "error", **environment: str) -> str:
    """Run a scene in a process of its own; it is silent on stderr. Return the last line that it prints."""
    function = f"{scene.__module__}:{scene.__name__}"
    command = [sys.executable, "-W", warnings, "-m", __name__, function, address, how]
    environment = {**os.environ, "PYTHONDEVMODE": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()[-1]


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
        command = [sys.executable, "-X", "dev", "-W", "error", "-m", __name__, "crew"]
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

    def acquire(self, name: str, ttl: float, slot: str = "it") -> asyncio.Future[Answer]:
        """Acquire a lock (token, fence, remaining), to be released as ``slot``."""
        return self.ask("acquire", slot, "lock", name, ttl)

    def permits(self, name: str, ttl: float, weight: int, limit: int, slot: str = "it") -> asyncio.Future[Answer]:
        """Acquire permits of a semaphore; otherwise as `acquire`."""
        return self.ask("acquire", slot, "semaphore", name, ttl, limit, weight)

    def robust(self, name: str, ttl: float, slot: str = "it") -> asyncio.Future[Answer]:
        """Acquire a robust lock (also: abandoned, the fence of who left it, or None); otherwise as `acquire`."""
        return self.ask("acquire", slot, "robust", name, ttl)

    def release(self, slot: str = "it") -> asyncio.Future[Answer]:
        return self.ask("release", slot)

    def run(self, job: Job, *words: object) -> asyncio.Future[Answer]:
        """Run a coroutine function of a module, with the coordinator and these words; its answer is a dict."""
        return self.ask("run", f"{job.__module__}:{job.__name__}", *words)

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


# -- what runs in the other process --------------------------------------------------------------------------


class Worker:
    """Does what the lines say. Every line is a task, so a waiting one holds up no other."""

    def __init__(self) -> None:
        self.sync: Coordinator | None = None
        self.leases: dict[str, Any] = {}
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
        os.write(1, json.dumps({"id": number, "wall": time.time(), **fields}).encode() + b"\n")

    async def do_open(self, url: str, claim: str) -> dict[str, object]:
        client: Any = Redis.from_url(url, client_name=name_of(os.getpid()))
        self.sync = Coordinator(client) if claim == "default" else Coordinator(client, claim=float(claim))
        await self.sync.lock("connected?").locked()
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
            await self.sync.client.aclose()
        self.sync = None
        self.leases.clear()
        self.bodies.clear()

    async def do_acquire(self, slot: str, kind: str, name: str, ttl: str, *permits: str) -> dict[str, object]:
        assert self.sync is not None
        options: dict[str, Any] = {"ttl": float(ttl)}
        if kind == "semaphore":
            limit, weight = map(int, permits)
            lease: Any = await self.sync.semaphore(name, limit, **options).acquire(weight=weight)
        else:
            made = AsyncRobustLock if kind == "robust" else AsyncLock
            lease = await made(self.sync, name, **options).acquire()
        self.leases[slot] = lease
        left = getattr(lease, "abandoned", None)
        return self.of(lease) | {"abandoned": left.fence if left else None, "at": time.monotonic_ns()}

    @staticmethod
    def of(lease: Any) -> dict[str, object]:
        return {"token": lease.token, "fence": lease.fence, "remaining": lease.remaining(), "lost": lease.lost}

    async def do_body(self, slot: str, name: str, ttl: str) -> dict[str, object]:
        """Enter ``async with``; the body ends by itself when it is told to `leave`."""
        assert self.sync is not None
        entered: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self.leave[slot] = asyncio.Event()
        self.bodies[slot] = asyncio.create_task(self.body(slot, self.sync.lock(name, ttl=float(ttl)), entered))
        return await entered

    async def body(self, slot: str, lock: Any, entered: asyncio.Future[dict[str, object]]) -> dict[str, object]:
        cancelled_at, raised = 0, ""
        try:
            async with lock as lease:
                self.leases[slot] = lease
                entered.set_result(self.of(lease))
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

    async def do_check(self, slot: str) -> dict[str, object]:
        self.leases[slot].check()
        return {}

    async def do_record(self, slot: str, progress: str) -> dict[str, object]:
        """Record progress under a robust lock."""
        await self.leases[slot].record(json.loads(progress))
        return {}

    async def do_lease(self, slot: str) -> dict[str, object]:
        return self.of(self.leases[slot])

    async def do_run(self, job: str, *words: str) -> dict[str, object]:
        found: dict[str, object] = await named(job)(self.sync, *words)
        return found

    async def do_stop(self, slot: str) -> dict[str, object]:
        """Stop ourselves in the middle of a turn; say whether the lease was known to be lost right then."""
        os.kill(os.getpid(), signal.SIGSTOP)
        return {"lost": self.leases[slot].lost}

    async def do_die(self, slot: str) -> dict[str, object]:
        """Kill ourselves in the middle of a turn, inside the section."""
        self.leases[slot].check()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def named(function: str) -> Any:
    """Return a function that is called ``module:name``."""
    module, name = function.split(":")
    return getattr(importlib.import_module(module), name)


def start(what: str, *words: str) -> None:
    """Run in this process what `play` or a `Child` started it for."""
    if what == "crew":
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        asyncio.run(Worker().run())
    else:
        named(what)(*words)


if __name__ == "__main__":
    start(*sys.argv[1:])

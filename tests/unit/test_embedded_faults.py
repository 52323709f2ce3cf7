"""The embedded server stands in for a crash or a stall, and does not outlive who started it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from redis_sync_aio.embedded import EmbeddedServer

from ..support.embedded import alive, eventually, group_exists, output, ping, python
from ..support.embedded import base as base

pytestmark = pytest.mark.real


@pytest.mark.parametrize("port", [None, 0])
async def test_restart_keeps_data_if_persistent(port: int | None) -> None:
    async with EmbeddedServer(port=port, persistent=True) as server:
        async with server.client() as client:
            await client.set("key", "value")
        pid, url, unix_socket = server.pid, server.url, server.unix_socket
        server.restart(keep_data=True)
        assert not alive(pid)
        assert (server.url, server.unix_socket) == (url, unix_socket)
        async with server.client() as client:
            assert await client.get("key") == b"value"


@pytest.mark.parametrize("persistent", [False, True])
async def test_restart_without_data(persistent: bool) -> None:
    async with EmbeddedServer(persistent=persistent) as server:
        async with server.client() as client:
            await client.set("key", "value")
        server.restart(keep_data=False)
        async with server.client() as client:
            assert await client.dbsize() == 0


def test_restart_refuses_to_keep_data_that_are_not_persistent() -> None:
    with EmbeddedServer() as server:
        with pytest.raises(ValueError, match="persistent=True"):
            server.restart(keep_data=True)
        assert ping(server.unix_socket) == b"+PONG\r\n"


def test_restart_needs_a_start() -> None:
    with pytest.raises(RuntimeError, match="not started"):
        EmbeddedServer().restart(keep_data=False)


async def test_kill_and_start_again() -> None:
    async with EmbeddedServer(port=0, persistent=True) as server:
        async with server.client() as client:
            await client.set("key", "value")
        pid, url = server.pid, server.url
        server.kill()
        server.kill()
        assert not alive(pid)
        with pytest.raises(OSError):
            ping(server.unix_socket)
        server.start()
        assert server.url == url
        async with server.client() as client:
            assert await client.get("key") == b"value"


def test_a_killed_server_is_removed_at_stop(base: Path) -> None:
    with EmbeddedServer() as server:
        server.kill()
        assert os.listdir(base)
    assert not os.listdir(base)


def test_pause_and_resume() -> None:
    with EmbeddedServer() as server:
        for _ in range(3):
            server.pause()
            server.pause()
            with pytest.raises(TimeoutError):
                ping(server.unix_socket, timeout=0.05)
            server.resume()
            server.resume()
            assert ping(server.unix_socket) == b"+PONG\r\n"


def test_a_paused_server_can_be_restarted_and_stopped() -> None:
    with EmbeddedServer() as server:
        server.pause()
        server.restart(keep_data=False)
        assert ping(server.unix_socket) == b"+PONG\r\n"
        server.pause()
        pid = server.pid
    assert not alive(pid)


def test_pause_reports_a_server_that_died_by_itself(base: Path) -> None:
    with EmbeddedServer() as server:
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="died by itself"):
            server.pause()
    assert not os.listdir(base)


# The end of the parent

START = "server = embedded.EmbeddedServer()\nserver.start()\n"
TELL = "print(server.pid, os.path.dirname(server.unix_socket), *workers, flush=True)\nsignal.pause()\n"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(START + "workers = []\n", id="alone"),
        pytest.param(START + "workers = []\nserver.pause()\n", id="paused", marks=pytest.mark.ci),
        pytest.param(START + "workers = []\nserver.restart(keep_data=False)\n", id="restarted", marks=pytest.mark.ci),
        pytest.param(
            """
server = embedded.EmbeddedServer()
thread = threading.Thread(target=server.start)
thread.start()
thread.join()
workers = []
""",
            id="started-in-a-thread",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            START
            + """
child = [sys.executable, "-c", "import sys; sys.stdin.read()"]
workers = [subprocess.Popen(child, close_fds=False).pid]
""",
            id="with-a-subprocess",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            START
            + """
workers = [os.fork()]
if not workers[0]:
    sys.stdin.read()
    os._exit(0)
""",
            id="with-a-forked-process",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_the_server_dies_with_a_killed_parent(script: str) -> None:
    with python(script + TELL) as parent:
        assert parent.stdout is not None
        pid, directory, *workers = parent.stdout.readline().split()
        assert alive(int(pid))
        os.kill(parent.pid, signal.SIGKILL)
        assert eventually(lambda: not alive(int(pid)))
        assert eventually(lambda: not os.path.exists(directory))
        assert all(alive(int(worker)) for worker in workers)


@pytest.mark.ci
def test_a_child_that_saves_dies_with_the_server() -> None:
    """It would go on writing to a directory that is gone: for a minute a key, here."""
    script = """
import redis
client = redis.Redis(unix_socket_path=server.unix_socket)
client.config_set("rdb-key-save-delay", 60_000_000)
client.set("key", "value")
client.bgsave()
workers = [client.info("persistence")["rdb_bgsave_in_progress"]]
"""
    with python(START + script + TELL) as parent:
        assert parent.stdout is not None
        pid, directory, saving = parent.stdout.readline().split()
        assert saving == "1"
        os.kill(parent.pid, signal.SIGKILL)
        try:
            assert eventually(lambda: not alive(int(pid)))
            assert eventually(lambda: not group_exists(int(pid)))
            assert eventually(lambda: not os.path.exists(directory))
        finally:
            if group_exists(int(pid)):
                os.killpg(int(pid), signal.SIGKILL)


@pytest.mark.ci
def test_the_server_dies_with_a_parent_that_forgot_it() -> None:
    pid, directory = output(START + "print(server.pid, os.path.dirname(server.unix_socket))\n")
    assert eventually(lambda: not alive(int(pid)))
    assert eventually(lambda: not os.path.exists(directory))


@pytest.mark.ci
def test_a_forgotten_object_does_not_end_the_server() -> None:
    script = """
unix_socket = server.unix_socket
del server
gc.collect()
print(embedded._answers(unix_socket))
"""
    assert output(START + script) == ["True"]


def test_a_forked_child_uses_the_server_but_does_not_own_it() -> None:
    script = """
if not (child := os.fork()):
    alive = embedded._answers(server.unix_socket)
    server.kill()
    server.stop()
    os._exit(0 if alive else 1)
_, status = os.waitpid(child, 0)
print(status, embedded._answers(server.unix_socket))
server.stop()
"""
    assert output(START + script) == ["0", "True"]


@pytest.mark.ci
def test_a_forked_child_does_not_own_a_server_that_was_killed() -> None:
    """It neither removes the data, nor keeps the port that was chosen."""
    script = """
server.stop()
server = embedded.EmbeddedServer(port=0)
server.start()
server.kill()
(stopped, stops), (ended, ends) = os.pipe(), os.pipe()
if not (child := os.fork()):
    server.stop()
    os.write(stops, b"1")
    os.close(ends)
    os.read(ended, 1)
    os._exit(0)
os.read(stopped, 1)
left = os.path.exists(os.path.dirname(server.unix_socket))
server.start()
port = server.port
server.stop()
embedded.HeldPort(port).close()
os.close(ends)
print(left, os.waitpid(child, 0)[1])
"""
    assert output(START + script) == ["True", "0"]


def test_ctrl_c_does_not_reach_the_server() -> None:
    script = """
came, comes = os.pipe()
os.set_blocking(comes, False)
signal.set_wakeup_fd(comes)  # signal.pause() would miss one that comes before it
try:
    print("ready", flush=True)
    os.read(came, 1)
except KeyboardInterrupt:
    print(embedded._answers(server.unix_socket), flush=True)
server.stop()
"""
    with python(START + script) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.stdout.readline() == "True\n"
        assert parent.wait(30) == 0

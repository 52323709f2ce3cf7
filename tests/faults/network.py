"""A network that can be cut, as by a pulled cable: servers on another host, as far as the kernel can see.

    async def scenario(network: Network) -> None:
        server = network.server()                 # with an address of its own
        network.cut(server)                       # from now on nothing gets there, and nobody is told
        network.heal(server)

    in_a_network(scenario)                        # in a test without asyncio: LookupError says why there is none

The scenario, a function of a test module, runs in a process of its own: that has a network namespace, and is connected
to another one, where the servers are. All of it is gone when the process ends. It needs Linux, ip, unshare and nsenter.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis_sync_aio import Backoff, wait_until
from redis_sync_aio.embedded import EmbeddedServer, find_server

ROOT = Path(__file__).parents[2]
PORT = 6379
TOOLS = ("ip", "unshare", "nsenter")
SECONDS = "250"
"""That the namespace of the servers lives, if this process is killed."""


class Network:
    """See the top of this module."""

    def __init__(self, host: int, stack: ExitStack) -> None:
        self._host = host  # a process in the namespace of the servers
        self._stack = stack
        self._addresses: dict[EmbeddedServer, str] = {}

    def server(self, *args: str) -> EmbeddedServer:
        """Start a server."""
        address = f"10.7.0.{11 + len(self._addresses)}"
        self._there("ip", "address", "add", f"{address}/32", "dev", "there")
        options = ("--bind", address, "--port", str(PORT), "--protected-mode", "no", "--cluster-announce-ip", address)
        server = self._stack.enter_context(EmbeddedServer(args=(*options, *args)))
        self._addresses[server] = address
        return server

    def address(self, server: EmbeddedServer) -> str:
        """Return its address; its port is `PORT`."""
        return self._addresses[server]

    def cut(self, server: EmbeddedServer) -> None:
        """Let nothing get there. Connections are not closed, and no attempt to connect is answered."""
        self._there("ip", "address", "del", f"{self._addresses[server]}/32", "dev", "there")

    def heal(self, server: EmbeddedServer) -> None:
        """Let everything get there again."""
        self._there("ip", "address", "add", f"{self._addresses[server]}/32", "dev", "there")

    def _there(self, *command: str) -> None:
        _run("nsenter", "-t", str(self._host), "-n", *command)


Scenario = Callable[[Network], Awaitable[None]]


def in_a_network(scenario: Scenario) -> None:
    """Run it; LookupError says why there can be no such network here."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LookupError(f"no {', '.join(missing)}")
    probe = "ip link set lo up && ip link add here type veth peer name there"
    try:
        _run("unshare", "-rn", "sh", "-c", probe)
    except subprocess.CalledProcessError as error:
        raise LookupError(f"no network namespaces: {error.stderr.strip()}") from None
    code = f"from {__name__} import main; main({scenario.__module__!r}, {scenario.__name__!r})"
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def main(module: str, name: str) -> None:
    """Run a scenario, in a network namespace of our own."""
    scenario: Scenario = getattr(importlib.import_module(module), name)

    async def run() -> None:
        with _network() as network:
            await asyncio.wait_for(scenario(network), 200)

    asyncio.run(run())


@contextmanager
def _network() -> Iterator[Network]:
    with ExitStack() as stack:
        host = stack.enter_context(subprocess.Popen(["unshare", "-n", "sleep", SECONDS]))
        stack.callback(host.kill)
        ours = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{host.pid}/ns/net") == ours:
            pass
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
        _run("ip", "link", "set", "there", "netns", str(host.pid))
        _run("ip", "address", "add", "10.7.0.1/24", "dev", "here")
        _run("ip", "link", "set", "here", "up")
        network = Network(host.pid, stack)
        network._there("ip", "link", "set", "lo", "up")
        network._there("ip", "address", "add", "10.7.0.2/24", "dev", "there")
        network._there("ip", "link", "set", "there", "up")
        program = Path(stack.enter_context(TemporaryDirectory())) / "server"
        program.write_text(f"#!/bin/sh\nexec nsenter -t {host.pid} -n '{find_server()}' \"$@\"\n")
        program.chmod(0o755)
        os.environ["REDIS_SYNC_AIO_SERVER"] = str(program)
        yield network


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


async def is_cluster(servers: list[EmbeddedServer], network: Network) -> None:
    """Make a cluster of them, of which each has an equal share of the slots."""
    for number, server in enumerate(servers):
        async with server.client() as plain:
            client: Any = plain
            first, last = -(-16384 * number // len(servers)), -(-16384 * (number + 1) // len(servers))
            await client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            await client.execute_command("CLUSTER", "ADDSLOTS", *range(first, last))
            if number:
                await client.execute_command("CLUSTER", "MEET", network.address(servers[0]), PORT)

    async def agree() -> bool:
        for server in servers:
            async with server.client() as plain:
                client: Any = plain
                known = await client.execute_command("CLUSTER", "SLOTS")
                if len(known) != len(servers) or not all(owner[1] == PORT and owner[0] for _, _, owner, *_ in known):
                    return False
        return True

    await wait_until(agree, Backoff(initial=0.01, cap=0.05), timeout=20)

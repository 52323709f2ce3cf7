"""A proxy that knows commands: it sends each to a server of its own choice, as proxies in front of a cluster do.

async with RoutingProxy(nodes, route) as proxy, Redis(host=proxy.host, port=proxy.port) as client:
    ...                                  # SUBSCRIBE may lead to another node than the keys

``route`` takes the words of a command and returns the number of a node; what sets up a connection goes to all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.testing._resp import Frame, Splitter

EVERYWHERE = frozenset({b"HELLO", b"AUTH", b"SELECT"})

Route = Callable[[list[bytes]], int]


class _Node:
    """The connection of one client to one node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.replies: asyncio.Queue[Frame] = asyncio.Queue()


class RoutingProxy:
    """Listens on a free port of 127.0.0.1, and connects each client to all nodes. Commands are answered in order."""

    host = "127.0.0.1"

    def __init__(self, nodes: Sequence[EmbeddedServer], route: Route) -> None:
        self._nodes = nodes
        self._route = route
        self._clients: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._client, self.host)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)
        nodes = [_Node(*await asyncio.open_connection(node.host, node.port)) for node in self._nodes]
        listening = [asyncio.create_task(self._listen(node, writer)) for node in nodes]
        try:
            splitter = Splitter()
            while data := await reader.read(65536):
                for frame in splitter.feed(data):
                    await self._command(frame, nodes, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client, or the test, has ended
        finally:
            for one in listening:
                one.cancel()
            for stream in (writer, *(node.writer for node in nodes)):
                stream.close()

    async def _command(self, frame: Frame, nodes: list[_Node], client: asyncio.StreamWriter) -> None:
        everywhere = frame.items[0].upper() in EVERYWHERE
        asked = nodes if everywhere else [nodes[self._route(frame.items)]]
        for node in asked:
            node.writer.write(frame.raw)
        replies = [await node.replies.get() for node in asked]
        client.write(replies[0].raw)

    async def _listen(self, node: _Node, client: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        with suppress(ConnectionError):
            while data := await node.reader.read(65536):
                for frame in splitter.feed(data):
                    if frame.kind == ">" and frame.items[0] == b"message":
                        client.write(frame.raw)
                    else:
                        node.replies.put_nowait(frame)

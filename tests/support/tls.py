"""Encrypted connections: a certificate for 127.0.0.1, who vouches for it, and a server behind it.

The servers that the suite runs with have no TLS themselves, so a `FaultProxy` speaks it for them.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from redis_sync_aio.testing.faults import FaultProxy


@dataclass(frozen=True, slots=True)
class Tls:
    """What a server and its clients need."""

    context: ssl.SSLContext
    """The server's."""
    options: dict[str, Any]
    """Of a client that believes it."""
    authority: Path

    def url(self, port: int) -> str:
        return f"rediss://127.0.0.1:{port}?ssl_ca_certs={self.authority}"


def make_tls(folder: Path) -> Tls:
    """Make a certificate, and an authority for it; what clients have to know of that is written to ``folder``."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    file = folder / "authority.pem"
    authority.cert_pem.write_to_path(str(file))
    return Tls(context, {"ssl": True, "ssl_ca_certs": str(file)}, file)


@contextmanager
def encrypted(upstream: str, tls: Tls) -> Iterator[int]:
    """Speak TLS for the server at ``upstream``, in a thread of its own, so for any event loop; yields the port."""
    loop = asyncio.new_event_loop()
    ports: list[int] = []
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with FaultProxy(upstream, tls.context) as proxy:
            ports.append(proxy.port)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()

"""Connections in a forked child: they belong to the parent, and the child must neither use nor close them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def dead_end(transport: asyncio.BaseTransport) -> None:
    """Point the transport's file descriptor at a silent socket, without touching the parent's connection.

    The child shares the parent's selector. It would read the parent's replies if its loop ran once more, as it does
    when a coroutine is left by SystemExit.
    """
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        ours, silent = socket.socketpair()
        ours.setblocking(False)
        os.dup2(ours.fileno(), connection.fileno())
        ours.close()
        _silent.append(silent)  # if it were closed, the child would read the end of the stream


_silent: list[socket.socket] = []


@contextmanager
def in_child(give_up: Callable[[], None]) -> Iterator[None]:
    """Call ``give_up`` in a child that is forked inside the block."""
    _open.add(give_up)
    try:
        yield
    finally:
        _open.discard(give_up)


_open: set[Callable[[], None]] = set()


def _give_up() -> None:
    for give_up in _open:
        give_up()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_give_up)

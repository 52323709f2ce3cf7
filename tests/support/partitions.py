"""Partitions: what a network may do to the way between a client and its server."""

from __future__ import annotations

from typing import Literal

import pytest

from .wired import Wired

modes = pytest.mark.parametrize("mode", ["link", "plain"])
Partition = Literal["refused", "black hole"]
partitions = pytest.mark.parametrize("kind", ["refused", "black hole"])


async def part(w: Wired, kind: Partition) -> None:
    if kind == "black hole":
        w.proxy.black_hole = True
    else:
        w.proxy.refuse = True
        await w.proxy.cut()


def heal(w: Wired) -> None:
    w.proxy.black_hole = w.proxy.refuse = False

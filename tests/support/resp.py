"""RESP, as the proxy of `redis_sync_aio.testing` reads it."""

from __future__ import annotations

from redis_sync_aio.testing._resp import (
    END,
    Dialogue,
    Frame,
    Predicate,
    ProtocolError,
    Splitter,
    as_bytes,
    encode,
)

__all__ = [
    "END",
    "Dialogue",
    "Frame",
    "Predicate",
    "ProtocolError",
    "Splitter",
    "as_bytes",
    "encode",
]

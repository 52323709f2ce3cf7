"""What takes an outcome as an `asyncio.Future` does."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class FutureLike(Protocol[T_contra]):
    """Takes a result or an error, once, unless it is done already."""

    def done(self) -> bool: ...
    def set_result(self, result: T_contra, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...

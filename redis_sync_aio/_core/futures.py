"""The protocol of receivers of an outcome, such as `asyncio.Future`."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class FutureLike(Protocol[T_contra]):
    """A receiver of one result or one error, unless it is done already."""

    def done(self) -> bool: ...
    def set_result(self, result: T_contra, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...

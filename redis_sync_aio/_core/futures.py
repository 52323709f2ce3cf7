"""Protocols of what receives an outcome, or the news that something has ended."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_contra = TypeVar("T_contra", contravariant=True)


class FutureLike(Protocol[T_contra]):
    """A receiver of one result or one error, unless it is done already."""

    def done(self) -> bool: ...
    def set_result(self, result: T_contra, /) -> None: ...
    def set_exception(self, error: Exception, /) -> None: ...


class Ended(Protocol):
    """Is set when a grant has ended."""

    def set(self) -> None: ...
    async def wait(self) -> None: ...

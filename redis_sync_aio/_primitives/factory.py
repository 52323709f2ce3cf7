"""Methods of a coordinator that make its primitives: each takes what the class takes after its client."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Concatenate, ParamSpec, TypeVar

from .._acquire.binding import CoordinatorLike

P = ParamSpec("P")
R = TypeVar("R")


def makes(
    make: Callable[Concatenate[CoordinatorLike, P], R],
) -> Callable[[Callable[..., object]], Callable[Concatenate[CoordinatorLike, P], R]]:
    """Decorate a method that calls ``make`` with its object as the first argument.

    The method has the arguments and the result of ``make``, for callers, type checkers and `inspect`. Of the decorated
    function only the name and the docstring count, so each option is stated once.
    """

    def named(stub: Callable[..., object]) -> Callable[Concatenate[CoordinatorLike, P], R]:
        @wraps(stub)
        def made(self: CoordinatorLike, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return make(self, *args, **kwargs)

        first, *_ = signature(stub).parameters.values()
        own = signature(make)
        made.__signature__ = own.replace(parameters=[first, *[*own.parameters.values()][1:]])  # type: ignore[attr-defined]
        return made

    return named

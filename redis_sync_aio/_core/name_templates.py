"""Names that refer to the arguments of a call: ``"user:{user_id}"``."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .arguments import is_async
from .display import shown

Names = Callable[[Sequence[Any], Mapping[str, Any]], tuple[str, ...]]


def check_template(template: object, what: str) -> str:
    """Return ``template`` if it is text with whole fields, else raise TypeError or ValueError."""
    if not isinstance(template, str):
        raise TypeError(f"{what} must be str, not {shown(template)}")
    try:
        fields_of(template)
    except ValueError as error:
        raise ValueError(
            f"{what} {template!r} is not a template: {error}; write a field as {{argument}}, and double other braces"
        ) from None
    return template


def without_fields(template: str) -> str:
    """Return the template without braces: a name like those that it makes, to check what can be checked."""
    return template.replace("{", "").replace("}", "")


def names_from(function: Callable[..., Any], templates: Sequence[str], *, given: bool = False) -> Names:
    """Return a function that makes names of the arguments of a call to the coroutine function ``function``.

    ``given``: its first argument is not in the call. Raises TypeError when it is no coroutine function, ValueError
    when a template refers to something that is not one of its arguments.
    """
    if not is_async(function):
        raise TypeError(f"{function!r} is not a coroutine function")
    signature = signature_without_first(function) if given else inspect.signature(function)
    for template in templates:
        unknown = fields_of(template) - set(signature.parameters)
        if unknown:
            taken = ", ".join(map(repr, signature.parameters)) or "none"
            raise ValueError(
                f"{template!r} refers to {sorted(unknown)}, not arguments of {function!r}: it takes {taken}"
            )

    def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(filled(template, bound.arguments) for template in templates)

    return names


def signature_without_first(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that callers use when a wrapper gives the first argument, the transaction.

    Raises TypeError when the function takes no positional argument.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise TypeError(
            f"{function!r} takes {len(signature.parameters)} arguments, none of them by position: its first one must "
            "be the transaction"
        )
    if first.kind is first.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def filled(template: str, arguments: Mapping[str, Any]) -> str:
    """Return the name that the template makes of arguments; their errors get a note that says where."""
    try:
        return template.format(**arguments)
    except BaseException as error:  # whatever the attributes and formats of the arguments raise
        error.add_note(f"redis_sync_aio: when the name {template!r} was made of the arguments of the call")
        raise


def fields_of(template: str) -> set[str]:
    """Return the arguments that the template refers to, those in its format specifications included.

    Raises ValueError for everything in the template that would fail whatever the arguments are.
    """
    reader = _Reader()
    reader.vformat(template, (), {})
    return reader.found


class _Reader(string.Formatter):
    """A formatter that fills in nothing and remembers the names of the arguments."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if isinstance(key, int):
            raise ValueError("a field without the name of an argument")
        self.found.add(key)
        return _ANYTHING

    def format_field(self, value: Any, format_spec: str) -> str:
        return ""  # whether it fits depends on the argument


class _Anything:
    """A placeholder for an argument: it has every attribute and every item."""

    def __getattribute__(self, name: str) -> Any:
        return self

    def __getitem__(self, key: object) -> Any:
        return self


_ANYTHING = _Anything()

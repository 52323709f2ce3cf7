"""Names that refer to the arguments of a call: ``"user:{user_id}"``."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._types import is_async

Names = Callable[[Sequence[Any], Mapping[str, Any]], tuple[str, ...]]


def check_template(template: object, what: str) -> str:
    """Return ``template`` if it is text with whole fields, else raise TypeError or ValueError."""
    if not isinstance(template, str):
        raise TypeError(f"{what} must be str, not {template!r}")
    try:
        positional = sorted(field for field in _fields(template) if not field or field[0].isdigit())
        if positional:
            raise ValueError(f"a field without the name of an argument, {{{positional[0]}}}")
    except ValueError as error:
        raise ValueError(
            f"{what} {template!r} is not a template: {error}; write a field as {{argument}}, and double other braces"
        ) from None
    return template


def without_fields(template: str) -> str:
    """Return the template without braces: a name like those that it makes, to check what can be checked."""
    return template.replace("{", "").replace("}", "")


def names_from(function: Callable[..., Any], templates: Sequence[str], *, given: int = 0) -> Names:
    """Return what makes names of the arguments of a call to the coroutine function ``function``.

    ``given``: so many of its first arguments are not in the call. Raises TypeError when it is no coroutine function,
    ValueError when a template refers to something that is not one of its arguments.
    """
    if not is_async(function):
        raise TypeError(f"{function!r} is not a coroutine function")
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if len(parameters) < given:
        raise TypeError(f"{function!r} takes {len(parameters)} arguments: its first one must be the transaction")
    signature = signature.replace(parameters=parameters[given:])
    for template in templates:
        roots = {field: field.split(".")[0].split("[")[0] for field in _fields(template)}
        unknown = {field for field, root in roots.items() if root not in signature.parameters}
        if unknown:
            raise ValueError(f"{template!r} refers to {sorted(unknown)}, not arguments of {function!r}")

    def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(_filled(template, bound.arguments) for template in templates)

    return names


def _filled(template: str, arguments: Mapping[str, Any]) -> str:
    try:
        return template.format(**arguments)
    except BaseException as error:  # whatever the attributes and formats of the arguments raise
        error.add_note(f"redis_sync_aio: when the name {template!r} was made of the arguments of the call")
        raise


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}

"""Names that refer to the arguments of a call: ``"user:{user_id}"``.

Two different lists of arguments never make one name. In a template with several fields, the text between two fields has
a character that separates them, and the values have this character escaped (``%3A`` for a colon), and ``%``.
"""

from __future__ import annotations

import inspect
import itertools
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple

from .arguments import is_async
from .clock import wall_ns
from .display import called, shown

Names = Callable[[Sequence[Any], Mapping[str, Any]], tuple[str, ...]]
Fill = Callable[[Mapping[str, Any]], str]
"""A function that makes a name of the arguments of a call."""


def check_template(template: object, what: str, advice: str = "") -> str:
    """Return ``template`` if it is text with whole fields, else raise TypeError or ValueError, with ``advice``."""
    if not isinstance(template, str):
        raise TypeError(f"{what} must be str, not {shown(template)}")
    try:
        fields_of(template)
    except ValueError as error:
        raise ValueError(
            f"{what} {template!r} is not a template: {error}; write a field as {{argument}}, and double other "
            f"braces{advice}"
        ) from None
    return template


def without_fields(template: str) -> str:
    """Return the template without braces: a name like those that it makes, to check what can be checked."""
    return template.replace("{", "").replace("}", "")


def names_from(
    function: Callable[..., Any], templates: Sequence[str], *, given: bool = False, verbatim: bool = False
) -> Names:
    """Return a function that makes names of the arguments of a call to the coroutine function ``function``.

    ``given``: its first argument is not in the call. ``verbatim``: values are not escaped. Raises TypeError when it is
    no coroutine function, ValueError when a template refers to something that is not one of its arguments.
    """
    if not is_async(function):
        raise TypeError(f"{called(function)} is not a coroutine function")
    signature = signature_without_first(function) if given else inspect.signature(function)
    for template in templates:
        check_fields(template, function, signature.parameters)
    fills = [fill_of(template, verbatim=verbatim) for template in templates]

    def names(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(fill(bound.arguments) for fill in fills)

    return names


def check_fields(template: str, function: Callable[..., Any], known: Collection[str]) -> None:
    """Raise ValueError if the template refers to something that is not in ``known``, the arguments of a function."""
    if unknown := fields_of(template) - set(known):
        taken = ", ".join(map(repr, known)) or "none"
        fields = ", ".join(map(repr, sorted(unknown)))
        raise ValueError(
            f"{template!r} refers to {fields}, which {called(function)} does not take: its arguments are {taken}"
        )


def signature_without_first(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that callers use when a wrapper gives the first argument, the transaction.

    Raises TypeError when the function takes no positional argument.
    """
    signature = inspect.signature(function)
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise TypeError(
            f"{called(function)} takes {len(signature.parameters)} arguments, none of them by position: its first "
            "one must be the transaction"
        )
    if first.kind is first.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


class NamePart(NamedTuple):
    """A part of a template: text, and the field behind it, which may be missing."""

    text: str
    field: str | None
    """The field in its braces, with conversion and format. None: the template ends with ``text``."""
    root: str
    """The argument that the field begins with, such as "user" of ``{user.id}``."""
    spec: str


def parts_of(template: str) -> list[NamePart]:
    """Return the parts of a template that `check_template` has accepted."""
    found, text = [], ""
    for literal, name, spec, conversion in string.Formatter().parse(template):
        text += literal
        if name is None:  # behind a doubled brace, or at the end
            continue
        field = f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
        found.append(NamePart(text, field, name.replace("[", ".").split(".")[0], spec or ""))
        text = ""
    return [*found, NamePart(text, None, "", "")]


def fill_of(template: str, *, unescaped: str | None = None, verbatim: bool = False) -> Fill:
    """Return the function that makes a name of arguments, with their separators escaped.

    ``unescaped``: an argument whose text is never escaped; ``verbatim``: none is. Raises ValueError if nothing
    separates two fields.
    """
    parts = parts_of(template)
    separators = "" if verbatim else _separators(template, parts, unescaped)
    table = _escapes(separators) if separators else {}

    def fill(arguments: Mapping[str, Any]) -> str:
        made = ""
        try:
            for text, field, root, _ in parts:
                made += text
                if field is not None:
                    value: Any = arguments.get(root)
                    known = isinstance(value, bytes) and len(field) == len(root) + 2  # no attribute, no format
                    value = value.decode() if known else text_of(field.format(**arguments), value)
                    made += value.translate(table) if table and root != unescaped else value
        except BaseException as error:  # whatever the attributes and formats of the arguments raise
            error.add_note(f"redis_sync_aio: when the name {template!r} was made of the arguments of the call")
            raise
        return made

    return fill


def _separators(template: str, parts: Sequence[NamePart], unescaped: str | None) -> str:
    """Return a character between each field and the next one; raise ValueError if there is none that separates."""
    fields = [part for part in parts if part.field is not None]
    found = ""
    for before, part in itertools.pairwise(fields):
        if before.root == part.root == unescaped:
            continue
        if (separator := next((char for char in part.text if not char.isalnum() and char != "%"), None)) is None:
            raise ValueError(
                f"{template!r} has nothing between {before.field} and {part.field} that tells where the first value "
                "ends: separate them by a colon, say"
            )
        found += separator
    return found


def text_of(text: str, value: object) -> str:
    """Return ``text``, which was made of ``value``; raise TypeError if it has the address of an object in it."""
    if " at 0x" in text and text.endswith(">") and not isinstance(value, str):
        raise TypeError(f"{text} has no text of its own, so every process would make another name of it")
    return text


def _escapes(separators: str) -> dict[int, str]:
    """Return the table of `str.translate` that escapes these characters, and "%"."""
    return {ord(char): "".join(f"%{byte:02X}" for byte in char.encode()) for char in f"{separators}%"}


_COLON = _escapes(":")


def escaped(value: str) -> str:
    """Return text for the end of a name, behind a colon: with its own colons escaped."""
    return value.translate(_COLON)


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


# -- The time in the name of a job: ``{now:%Y-%m-%d}`` ---------------------------------------------------------
#
# A format says how long a slot lasts. That is found out by trial, for every directive that this machine knows: times
# that differ in one unit have the same text, or not.


NOW = "now"
"""The field of the time."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = 86_400.0
HOUR = 3600.0


class Unit(NamedTuple):
    """A unit of time: times that differ in nothing else, its longest, and its shortest length in seconds."""

    times: tuple[datetime, ...]
    longest: float
    shortest: float


_MONDAY = datetime(2023, 1, 2)
UNITS = (
    Unit((_MONDAY, _MONDAY.replace(minute=1)), 60.0, 60.0),
    Unit((_MONDAY, _MONDAY.replace(hour=1)), HOUR, HOUR),
    Unit((_MONDAY, _MONDAY.replace(hour=12)), DAY / 2, DAY / 2),
    Unit(tuple(_MONDAY.replace(day=day) for day in range(2, 8)), DAY, DAY),
    Unit((_MONDAY, _MONDAY.replace(day=9)), 7 * DAY, 7 * DAY),
    Unit((_MONDAY, _MONDAY.replace(month=2)), 31 * DAY, 28 * DAY),
    Unit(tuple(_MONDAY.replace(year=year) for year in (2023, 2024, 2034)), 366 * DAY, 365 * DAY),
)
"""The units of formats, the smallest first."""
WITHIN_A_MINUTE = [
    _MONDAY,
    _MONDAY.replace(microsecond=1),
    _MONDAY.replace(second=1),
    _MONDAY.replace(second=59, microsecond=999_999),
]


class SlotName:
    """The template of a job's name, with the time of the call as ``{now:FORMAT}``.

    Raises TypeError or ValueError for a template that `check_template` has accepted, and that makes no slots.
    """

    def __init__(self, template: str, tz: tzinfo) -> None:
        if not isinstance(tz, tzinfo):
            raise TypeError(f"tz must be a tzinfo, such as ZoneInfo('Europe/Berlin'), not {shown(tz)}")
        self.template = template
        self._tz = tz
        self._fill: Fill = fill_of(template, unescaped=NOW)
        fields = [part for part in parts_of(template) if part.root == NOW]
        self._specs = [part.spec for part in fields]
        for part in fields:
            if part.field != f"{{{NOW}:{part.spec}}}" or not part.spec or "{" in part.spec:
                raise ValueError(
                    f"{part.field} in {template!r} has no format, or not only a format: write the time as "
                    "{now:%Y-%m-%d}, which makes a slot for each day"
                )
        self.lasts = 0.0
        """The longest time of one slot in seconds. 0: the name has no time."""
        self.comes_again: float | None = None
        """Seconds until the name may be that of another slot. None: it never is."""
        if fields:
            self._measure()

    def _measure(self) -> None:
        what = f"the time in {self.template!r}"
        try:
            if self._texts(WITHIN_A_MINUTE) > 1:
                raise ValueError(f"{what} is finer than a minute, so every call would be a slot of its own")
            texts = [self._texts(unit.times) for unit in UNITS]
            summer_time = self._tz.utcoffset(_MONDAY) != self._tz.utcoffset(_MONDAY.replace(month=7))
        except NotImplementedError as error:  # an abstract tzinfo
            raise TypeError(f"tz must be a tzinfo with an offset, not {self._tz!r}") from error
        first = next((number for number, found in enumerate(texts) if found > 1), None)
        if first is None:
            raise ValueError(f"{what} is the same at all times: write it as {{now:%Y-%m-%d}}")
        for unit, found in zip(UNITS[first:], texts[first:], strict=True):
            if found < len(unit.times):
                self.comes_again = unit.shortest
                break
        self.lasts = UNITS[first].longest
        if summer_time and self.lasts > HOUR:
            self.lasts += HOUR

    def _texts(self, times: Sequence[datetime]) -> int:
        """Return how many different texts these times have."""
        return len({self._text(time.replace(tzinfo=self._tz)) for time in times})

    def _text(self, time: datetime) -> tuple[str, ...]:
        return tuple(format(time, spec) for spec in self._specs)

    def keep(self, asked: float | None) -> float:
        """Return the seconds for which a slot is remembered; raise ValueError if ``asked`` does not fit the format."""
        least, most = self.lasts, None if self.comes_again is None else self.comes_again - self.lasts
        if asked is None:
            default = max(DAY, 2 * least)
            return default if most is None else min(default, most)
        if least and asked <= least:
            raise ValueError(
                f"keep must be more than the {least:g} seconds of a slot of {self.template!r}, not {asked:g}: the slot "
                "would run again. Leave keep out"
            )
        if most is not None and asked > most:
            raise ValueError(
                f"keep must be at most {most:g} seconds, not {asked:g}: the name {self.template!r} comes again, and "
                "that slot would not run. Leave keep out, or write more of the date"
            )
        return asked

    def signature(self, function: Callable[..., Any]) -> inspect.Signature:
        """Return the signature of a coroutine function that makes these names; raise TypeError or ValueError."""
        if not is_async(function):
            raise TypeError(f"{called(function)} is not a coroutine function")
        signature = inspect.signature(function)
        check_fields(self.template, function, [*signature.parameters, NOW])
        if self._specs and NOW in signature.parameters:
            raise ValueError(
                f"{NOW!r} in {self.template!r} is the time of the call: rename the argument of {called(function)}"
            )
        return signature

    def of(self, arguments: Mapping[str, Any]) -> str:
        """Return the name of the slot of now."""
        if not self._specs:
            return self._fill(arguments)
        at = (EPOCH + timedelta(microseconds=wall_ns() // 1000)).astimezone(self._tz)
        return self._fill({**arguments, NOW: _Time(at, self._is_second(at))})

    def _is_second(self, at: datetime) -> bool:
        """Return whether the clocks were set back, and another slot had the same text."""
        return bool(at.fold) and self.lasts <= HOUR and self._text(at) == self._text(at.replace(fold=0))


class _Time:
    """The time of a call, as a template writes it; in an hour that comes a second time with its offset."""

    def __init__(self, at: datetime, second: bool) -> None:
        self._at = at
        self._offset = f"{at:%z}" if second else ""

    def __format__(self, spec: str) -> str:
        return f"{self._at:{spec}}{self._offset}"

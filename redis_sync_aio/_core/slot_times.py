"""The time in the name of a job: ``{now:%Y-%m-%d}``.

A format says how long a slot lasts. That is found out by trial, for every directive that this machine knows: times that
differ in one unit have the same text, or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, NamedTuple

from .arguments import is_async
from .clock import wall_ns
from .display import called, shown
from .name_templates import Fill, check_fields, fill_of, parts_of

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

"""Renewals in flight, and until when the server certainly keeps a lease in spite of them.

The server may execute any of several renewals in flight last, and a shorter one ends the lease sooner (P1). While that
one is not answered, no answer to another lets the lease last longer than it does.

The span that was known before is kept until they are answered: a renewal that is refused, or was never sent, changes
nothing.

A copy of a renewal whose connection was lost may be executed later, even if another copy was answered, unless this
connection is known to have ended at the server, too. So for a while an answer lets the lease last no longer than such
a copy would.
"""

from __future__ import annotations

import math
from typing import TypeAlias
from weakref import WeakKeyDictionary

from .._core.clock import now

Span: TypeAlias = tuple[float, float]
"""The beginning (local clock) and the seconds from then on."""


STRAY_FOR = 60.0
"""Seconds for which a copy on a lost connection is expected: as long as a tombstone lasts."""
_NONE: Span = (-math.inf, math.inf)


class Sent:
    """A renewal in flight."""

    __slots__ = ("given_up", "span")

    def __init__(self, span: Span) -> None:
        self.span: Span = span
        """Least seconds for which the lease lasts if it is executed, counted from before it was first sent."""
        self.given_up: bool = False
        """Whether its answer is not awaited any more. It may still be executed."""


class InFlightRenewals:
    """The renewals in flight, in the order of sending, by the permit that they renew."""

    def __init__(self) -> None:
        self._sent: WeakKeyDictionary[object, list[Sent]] = WeakKeyDictionary()
        # Until when copies are expected, and the seconds of the shortest one.
        self._stray: WeakKeyDictionary[object, Span] = WeakKeyDictionary()
        # From answers, for permits that a renewal may cut.
        self._known: WeakKeyDictionary[object, Span] = WeakKeyDictionary()

    def add(self, permit: object, span: Span, known: Span | None) -> Sent:
        """Note a renewal that is sent now. ``known`` is how long the permit lasted before, if it may cut that."""
        sent = Sent(span)
        self._sent.setdefault(permit, []).append(sent)
        if known is not None:
            self._known.setdefault(permit, known)
        return sent

    def without_effect(self, permit: object, sent: Sent) -> None:
        """Forget ``sent``, which never is executed. Earlier renewals that were given up may have been."""
        found = self._sent.get(permit)
        if found is not None and sent in found:
            found.remove(sent)
            if not found:
                del self._sent[permit]

    def learn(self, permit: object, span: Span) -> Span:
        """Note that the server let ``permit`` last for ``span``; return how long it lasts if another one cuts that."""
        if permit in self._sent:
            if permit in self._known:
                self._known[permit] = span
        else:
            self._known.pop(permit, None)
        return self.shortest(permit, span)

    def known(self, permit: object) -> Span | None:
        """Return how long ``permit`` lasts by what was known before; None if nothing may have cut that."""
        span = self._known.get(permit)
        if span is None:
            return None
        if permit not in self._sent:
            del self._known[permit]
        return self.shortest(permit, span)

    def answered(self, permit: object, sent: Sent, ambiguous: bool, alone: bool) -> None:
        """Note that the server has answered ``sent``, and with that all earlier ones that were given up.

        A copy of those, or of ``sent`` if it is ``ambiguous``, may still arrive by a connection that was lost, unless
        the present one is known to be ``alone``.
        """
        found = self._sent.get(permit)
        if found is None or sent not in found:
            return
        place = found.index(sent)
        stray = [other for other in found[:place] if other.given_up] + ([sent] if ambiguous else [])
        if alone:
            self._stray.pop(permit, None)
        elif stray:
            seconds = min(other.span[1] for other in stray)
            self._stray[permit] = now() + STRAY_FOR, min(seconds, self._shortest_stray(permit))
        found[:] = [other for other in found[:place] if not other.given_up] + found[place + 1 :]
        if not found:
            del self._sent[permit]

    def any(self, permit: object) -> bool:
        """Return whether the server may prolong ``permit``, or may have done so, without an answer."""
        return permit in self._sent or self._shortest_stray(permit) < math.inf

    def _shortest_stray(self, permit: object) -> float:
        until, seconds = self._stray.get(permit, _NONE)
        return seconds if now() < until else math.inf

    def shortest(self, permit: object, known: Span) -> Span:
        """Return the span that ends first: ``known``, cut by a stray copy, or that of a renewal in flight."""
        since, seconds = known
        known = since, min(seconds, self._shortest_stray(permit))
        return min((known, *(sent.span for sent in self._sent.get(permit, ()))), key=sum)

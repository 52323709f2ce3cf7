"""The common part of decisions about locks and about permits: the queue, and the messages to inboxes."""

from __future__ import annotations

from enum import Enum

from .._scripts.constants import ASK_AGAIN, CONTENDED, LATER_MS, SOONER_TRIES
from .snapshot import LockSnapshot, Message, PermitSnapshot, Sharer, Ticket


class Settled(Enum):
    """States of a queue for a request, after the waiters ahead of it got what is free."""

    GRANTED = 1  # a waiter holds the lock now
    RESERVED = 2  # a waiter ahead will take what is free by itself: it polls, or no message reached it
    FULL = 3  # the first waiter needs more permits than are free
    FREE = 4  # no waiter is ahead
    LATER = 5  # the ticket of the first waiter has a later layout: its own scripts grant it


class QueueDraft:
    """The queue of a snapshot on which one decision is worked out."""

    def __init__(self, before: LockSnapshot | PermitSnapshot) -> None:
        self.now = before.now
        self.queue, self.polls = list(before.queue), dict(before.polls)
        self.messages: list[Message] = []
        self._deaf, self._mute = before.deaf, before.mute
        self._unread, self._places = before.unread, before.places

    def waiting(self) -> int:
        """Return how many tickets are in the queue."""
        return len(self.queue) + self._unread

    def crowded(self, most: int | None) -> bool:
        """Return whether ``most`` tickets, or more, are in the queue; None: it may have any number."""
        return most is not None and self.waiting() >= most

    def come_back(self, member: bytes, former: int | None) -> bool:
        """Give a ticket that was passed over its ``former`` place again; return True if it had lost it.

        A place that is not in the past is that of another clock.
        """
        if not former or former >= self.now or member in self.queue:
            return False
        earlier = [other for other in self.queue if (self._places.get(other, 0), other) < (former, member)]
        self.queue.insert(len(earlier), member)
        return True

    def leave(self, member: bytes) -> None:
        """Take a ticket out of the queue."""
        if member in self.queue:
            self.queue.remove(member)
        self.polls.pop(member, None)

    def publish(self, inbox: bytes, number: int, payload: bytes) -> bool:
        """Send the payload for ticket ``number`` to an inbox; return whether it has a listener, as far as is known."""
        listens = inbox not in self._deaf
        if not self._mute:
            told = Message(inbox, b"%d %b" % (number, payload)) if listens else Message.astray(inbox, number)
            self.messages.append(told)
        return listens

    def lives(self, member: bytes, ticket: Ticket | None) -> bool:
        """Return True if the owner of a ticket lives that polls, or has a later layout: it is told to ask again."""
        if ticket is not None and ticket.inbox:
            if not self.publish(ticket.inbox, ticket.number, b"%d %016d 0" % (ASK_AGAIN, self.now)):
                return False
            self.polls.setdefault(member, self.now // 1000 + LATER_MS)
        return self.polls.get(member, 0) * 1000 > self.now

    def tell_contended(self, token: bytes) -> None:
        """Notify a holder whose process shares its lease among tasks that another request waits."""
        sharer = Sharer.of(token)
        if sharer is not None:
            self.publish(sharer.inbox, sharer.number, b"%d %016d 0" % (CONTENDED, self.now))

    def tell_sooner(self, ms: int) -> None:
        """Notify the first of two waiters that listens: something is free in ``ms``, sooner than expected."""
        for member in self.queue[:SOONER_TRIES]:
            ticket = Ticket.parse(member)
            told = b"0 %016d %d" % (self.now, ms)
            if ticket is not None and ticket.inbox and self.publish(ticket.inbox, ticket.number, told):
                return

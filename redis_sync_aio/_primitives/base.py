"""The common part of locks, semaphores and the two sides of a read/write lock: everything but their meaning.

A primitive chooses keys, and with them the scripts that decide; here its arguments become requests, and the one
acquire path (`_leases/acquisition.py`) does the rest.
"""

from __future__ import annotations

from asyncio import current_task, gather
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from threading import get_ident
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, get_args
from weakref import ref

from .._client.replies import Argument, ReplyError, Words, refusal
from .._client.settings import Client, encode
from .._core.arguments import Name, Seconds, count, one_of, require_bool, seconds, timeout_seconds, ttl_ms
from .._core.cancellation import undo_in
from .._core.display import bytes_of, text
from .._core.keys import LABEL_MARK, Engine, Keys, labelled
from .._core.redis_py_words import explains_words_of_redis_py
from .._engine.commands import Answer, Commands
from .._engine.watch_dialogue import checked
from .._engine.watch_permits import state_alone
from .._leases.acquisition import Replicated, Request, acquire, never_refused, refused_if_full
from .._leases.cohort import Cohort, acquire_shared, cohort_of
from .._leases.detached import to_release, token_of
from .._leases.grant import Grant, current_ref
from .._leases.hold import Acquiring, LeaseContext, OnLost
from .._leases.hub import SHOWN, Hub
from .._leases.implicit import CoordinatorLike, MakeKeys, client_of, hub_of, keys_of, label_prefix_of
from .._leases.lease import BaseLease
from .._leases.resource import Resource
from .._scripts.constants import FOREVER, WRITER_WEIGHT, ReleaseReply
from .._transport.call import Call
from ..errors import AcquireTimeout, NotHeld, SyncError, WrongContext

if TYPE_CHECKING:
    from .._core.observers import Observation
    from .._inspection.views import Access, NameView

# -- The options that all primitives have in common ------------------------------------------------------------


class Wanted(NamedTuple):
    """The part of a request for several locks that each of them gets."""

    ttl: Seconds | None
    label: str | None


def by_scripts(engine: Engine, what: str) -> Engine:
    """Return the ``engine`` of a primitive that needs scripts; raise ValueError that names it for "watch"."""
    if engine == "watch":
        raise ValueError(f'{what} needs scripts: engine must be "lua" or "auto", not "watch"')
    return engine


MOST_REPLICAS = 1000
"""More than a server has."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """Options for the duration and the end of leases, as the caller gave them. `AsyncLock` explains each.

    A primitive checks them when it is made.
    """

    ttl: Seconds | None
    auto_renew: bool
    max_hold: Seconds | None
    on_lost: OnLost
    engine: Engine
    share: bool = False
    linger: Seconds = 0.0
    max_waiting: int | None = None
    replicas: int = 0
    replicated_within: Seconds = 1.0

    def checked_replicated(self) -> Replicated | None:
        """Return the confirmation that grants need, None for ``replicas=0``; or raise TypeError or ValueError."""
        replicas = count(self.replicas, "replicas")
        within = ttl_ms(self.replicated_within, "replicated_within") / 1000
        if not replicas:
            return None
        if replicas > MOST_REPLICAS:
            raise ValueError(f"replicas must be {MOST_REPLICAS} or less, not {replicas}")
        by_scripts(self.engine, f"replicas={replicas}")
        if self.ttl is None and self.max_hold is None:
            raise ValueError("replicas needs a ttl: a grant is confirmed by a renewal")
        return Replicated(replicas, within)

    def checked_max_waiting(self) -> int | None:
        """Return ``max_waiting``, or raise TypeError or ValueError."""
        if self.max_waiting is None:
            return None
        if self.share:
            raise ValueError(
                "max_waiting cannot be combined with share=True, since tasks that share wait behind one request: "
                "leave one of them out"
            )
        return count(self.max_waiting, "max_waiting")


# -- Methods of a coordinator that make its primitives: each takes what the class takes after its client -------


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


L = TypeVar("L", bound=BaseLease)
B = TypeVar("B", bound="Primitive[Any]")


class Face(Generic[B]):
    """Base of the objects that stand on one primitive, and show less of it."""

    _on: B

    async def statistics(self) -> NameView:
        """Return the holders and the waiters as the server sees them, as `AsyncLock.statistics`."""
        return await self._on.statistics()

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return self._on.name


MOST_FORCED = 10_000
"""Most holders from whom one `force_release` takes permits."""
FORCED_AT_ONCE = 100
"""Number of releases of one `force_release` that are in flight together."""


class Primitive(LeaseContext[L]):
    """Base of everything that is acquired; see the top of this module."""

    _kind = ""
    """Its kind in events; empty: the events are about the primitive that stands on it."""
    _pattern = ""
    """The template that its name was made from, if any."""
    _weight = 0  # of a request for permits; a lock has none
    _grant_type: type[Grant] = Grant
    _lease_type: type[L]
    """The type that an acquisition returns: the face of a grant."""
    _side = 0  # weight of this side's leases; 0: not a read/write lock
    _access: Access | None = None
    """The side of a read/write lock; None: all holders are holders of this primitive."""
    _limit = 0
    _option: Argument = b""
    """The argument of its requests behind the limit: of a semaphore, whose limit counts."""
    _unqueued: tuple[Argument, ...] = ()
    """More arguments of its requests until they are in the queue: at most how many others wait."""
    _label = b""
    """The beginning of the tokens of requests without a label of their own."""
    _immediate: Request | None = None
    """Its request that does not wait and has no arguments of its own, once there was one."""
    _release_args: tuple[Argument, ...] = ()  # what the release of an identity says about a record, if there is one

    def __init__(
        self,
        client: Client | CoordinatorLike,
        name: Name,
        keys: MakeKeys[Keys],
        options: LeaseOptions,
    ) -> None:
        super().__init__(options.on_lost)
        engine, ttl, max_hold = options.engine, options.ttl, options.max_hold
        one_of(engine, get_args(Engine), "engine")
        self._source = client
        self._client = client_of(client)
        self._replicated = options.checked_replicated()
        if self._replicated is not None:
            engine = "lua"
        self._keys = keys_of(client, name, keys).by(engine)
        self._ttl_ms = FOREVER if ttl is None else ttl_ms(ttl)
        self._auto_renew = require_bool(options.auto_renew, "auto_renew")
        self._max_hold = None if max_hold is None else ttl_ms(max_hold, "max_hold") / 1000
        self._linger = seconds(options.linger, "linger")
        if not require_bool(options.share, "share") and self._linger:
            raise ValueError("linger is for tasks that share what their process holds: it needs share=True")
        self._share = options.share and engine != "watch"
        self._max_waiting = options.checked_max_waiting()
        if self._max_waiting is not None:
            self._unqueued = (self._max_waiting,)
        self._label = self._label or label_prefix_of(client)
        self._prepare_requests()
        # Used by the latest acquisition, and kept so that the next one need not look it up.
        self._hub: Hub | None = None
        self._latest_resource: Resource | None = None
        self._cohort: Cohort | None = None

    # -- acquiring -------------------------------------------------------------------------------------

    @explains_words_of_redis_py
    def acquire(
        self,
        *,
        timeout: Seconds | None = None,
        ttl: Seconds | None = None,
        identity: Name | None = None,
        label: str | None = None,
    ) -> Acquiring[L]:
        """Wait for the turn and return the lease: await it, or enter it with ``async with``.

        A free lock costs one round trip. A contended one costs one command to queue; the grant is then pushed.

        Args:
            timeout: How long to wait (seconds). 0: do not wait. None: forever.
            ttl: The ttl of this lease. None: the ttl of this object.
            identity: A name of the caller, stored as the token of the holder. A request with the same identity, from
                any process, gets the same lease, and may release it.
            label: A text for people, at most 512 bytes: who holds or waits, in ``redis-sync-aio show``, events,
                statistics and the AcquireTimeout of others, who see an identity instead. With ``share=True`` a request
                with a label takes a lease of its own. None: the label of the coordinator.

        Raises:
            AcquireTimeout: Others held it for all of ``timeout``, or Redis had not answered by then. QueueFull is a
                subclass.
            NotReplicated: With ``replicas``: too few replicas had the grant, which was given back.
            Unreachable: Redis did not answer within ``timeout``, or within ``retry_for`` of the coordinator.
            CommandRefused: The server answered with an error (out of memory, no permission, wrong type of key …).
            WouldDeadlock: A body of this task holds it and excludes all others (a lock, the write side). Nothing was
                sent, or the request was withdrawn when it had to wait (another client, coordinator or engine). Not
                raised if that body keeps running after a loss (``on_lost="event"``).
            CoordinatorClosed, WrongContext: The coordinator was closed, or belongs to another event loop or process.
            TypeError, ValueError: At the call: an argument is bad. Nothing was sent.

        On cancellation, whatever the server did for the request is undone, without delaying the cancellation.

        Example:
            ```python
            async with lock.acquire(timeout=5) as lease:  # released at the end of the body
                ...
            lease = await lock.acquire(timeout=5)  # release it yourself
            await lease.release()
            ```
        """
        within = None if timeout is None else timeout_seconds(timeout)
        request = self._request(ttl, identity, label, wait=within != 0)
        return Acquiring(self._acquired(request, within or None), self._on_lost)

    async def _acquired(self, request: Request, within: float | None) -> L:
        cohort = self._cohort  # of the default; while it holds something it is the one that its coordinator knows
        if (
            cohort is not None
            and request is self._default
            and cohort.grants
            and cohort.thread == get_ident()
            and (hub := cohort.hub).observing.observers is None
            and hub.hands_on
            and (task := current_task(cohort.loop)) is not None
            and (answer := cohort.enter(request, task, within)) is not None
        ):
            # As `acquire_shared`, without its coroutine: for grants inside the process, which cost little else.
            try:
                grant = await answer
            except BaseException:
                undo_in(cohort.loop, partial(cohort.task_cancelled, answer, request))
                del answer  # else it keeps the traceback, and so what the caller acquires next, in a cycle
                raise
            assert grant is not None  # it waits
            by = grant.acquirer = ref(task)
            grant.root = getattr(task.get_coro(), "cr_code", None)
            if cohort.listed:
                cohort.resource.leases.note(by, grant)
            return self._lease_type(grant, self._itself)
        granted = await self._try(request, within)
        return self._lease_type(await self._refuse(request) if granted is None else granted, self._itself)

    @explains_words_of_redis_py
    def try_acquire(
        self, *, ttl: Seconds | None = None, identity: Name | None = None, label: str | None = None
    ) -> Acquiring[L | None]:
        """Return a lease, or None if the lock is taken or contended. One round trip.

        Arguments, errors and cancellation are those of `acquire`, without AcquireTimeout.
        """
        return Acquiring(self._tried(self._request(ttl, identity, label, wait=False)), self._on_lost)

    # -- releasing and looking -------------------------------------------------------------------------

    async def release(self, *, identity: Name | None = None) -> None:
        """Release the latest lease that the current task acquired here; with ``identity``, the lease of that identity.

        A task that acquired none releases the lease of a task that has ended, if there is exactly one. The lease of a
        living task stays, as does one under a reentrant lock, a multi-lock or a Redlock: call ``lease.release()``.

        Raises:
            NotHeld: There is no such lease. Nothing was changed. The message names the holders.
            LeaseLost, Unreachable, CommandRefused: As for `Lease.release`.
            CoordinatorClosed, WrongContext: The coordinator cannot be used.
            TypeError, ValueError: The identity is bad.

        On cancellation the release continues in the background.
        """
        if identity is None:
            resource = self._known()
            own = None
            if resource is not None:
                resource.list_shares()
                own = resource.leases.latest(current_ref(), self._side)
            await (own or to_release(self._held(), self.name)).release()
            return
        token = self._encode(identity, "identity")
        resource = self._known()
        here = None if resource is None else resource.identities
        for lease in () if here is None else here.leases.of(token):
            await lease.release()
            return
        if not await self._release_token(token):
            holders = await self._holders()
            found = f" but by {holders}: nothing was changed" if holders else ", nor by any other client"
            raise NotHeld(f"{self.name!r} is not held by {text(token)!r}{found}")

    async def _release_token(self, token: bytes) -> bool:
        """Release the lease of ``token`` on the server, from any process; return False if there is none."""
        resource = self._known()
        here = None if resource is None else resource.identities
        sent: list[Call] = []

        def send(commands: Commands, call: Call) -> None:
            if here is not None:
                here.end_by(token, call)
            commands.release(self._keys, token, call, release_args=self._release_args, undoes=True)
            sent.append(call)

        found = await self._at_work().ask(send, goes_on=True)
        # P4: a copy of this very release may have been executed, and its answer lost.
        return found == ReleaseReply.RELEASED or sent[0].ambiguous

    def _leases(self) -> list[Grant]:
        """Return this process's leases of what has these keys, the oldest first."""
        resource = self._known()
        return [] if resource is None else resource.held()

    def _held(self) -> list[Grant]:
        """Return this process's leases of it, the oldest first."""
        return self._leases()

    async def statistics(self) -> NameView:
        """Return the holders and waiters, with their times and fences, as the server sees them. Two round trips.

        It is the view of [`inspect`][redis_sync_aio.inspection.inspect], read behind all commands of this process about
        the name. Counts are of one moment; at most 100 holders and waiters are listed. In a cluster, ``connected`` is
        None for a process that is not connected to the shard of the name.

        Raises:
            Unreachable, CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation the replies are ignored.
        """
        return await self._at_work().look(self._keys)

    async def _look(self, shown: int = SHOWN) -> NameView:
        """Return the view without details, in one round trip: ``held`` of permits may count some that have expired."""
        return await self._at_work().look(self._keys, shown, whole=False)

    async def _holders(self) -> str:
        """Return the holders, for an error message; empty when there is none."""
        return ", ".join(repr(it.token) for it in (await self._look(5)).holders)

    @property
    def name(self) -> str:
        """The name it was made with, as text; bytes that are not UTF-8 are shown escaped."""
        return text(self._keys.name)

    # -- inside ----------------------------------------------------------------------------------------

    def _at_work(self) -> Hub:
        """Return the hub that it uses here and now."""
        try:
            return hub_of(self._source)
        except WrongContext as error:
            raise error.about(repr(self)) from None

    def _resource(self) -> Resource:
        hub = self._hub
        if hub is None or not hub.usable():
            hub = self._hub = self._at_work()
        resource = self._latest_resource = hub.resource(self._keys, self._latest_resource)
        return resource

    def _known(self) -> Resource | None:
        """Return the name as this process sees it, if there is anything to see."""
        return self._at_work().resources.get(self._keys.id)

    def _shown_label(self, label: str | None) -> str:
        """Return the label of a request, for which the caller gave ``label``, as events show it."""
        return label or text(self._label[: -len(LABEL_MARK)])

    def _encode(self, value: Name, what: str) -> bytes:
        return encode(self._client, value, what)

    def _request(
        self,
        ttl: Seconds | None,
        identity: Name | None,
        label: str | None,
        *,
        wait: bool = True,
        weight: int | None = None,
    ) -> Request:
        if ttl is None and identity is None and label is None and (weight is None or weight == self._weight):
            if wait:
                return self._default
            if self._immediate is None:
                self._immediate = replace(self._default, wait=False)
            return self._immediate
        return self._new_request(ttl, identity, label, wait, self._weight if weight is None else weight)

    def _new_request(
        self, ttl: Seconds | None, identity: Name | None, label: str | None, wait: bool, weight: int
    ) -> Request:
        refused = self._refusal()
        if self._max_waiting is not None:
            refused = partial(refused_if_full, name=self.name, most=self._max_waiting, otherwise=refused)
        ms = self._ttl_ms if ttl is None else ttl_ms(ttl)
        if self._max_hold is not None:
            most = int(self._max_hold * 1000)
            ms = min(ms, most) if ms else most
        return Request(
            ms,
            self._auto_renew and ms != FOREVER,
            self._max_hold,
            None if identity is None else self._encode(identity, "identity"),
            wait=wait,
            weight=weight,
            limit=self._limit,
            option=self._option,
            unqueued=self._unqueued,
            refused=refused,
            shared=self._share and identity is None and label is None and ms != FOREVER,
            linger=self._linger,
            grant_type=self._grant_type,
            label=labelled(label) or self._label,
            replicated=self._replicated,
        )

    def _prepare_requests(self) -> None:
        """Make the request that has no arguments of its own; the one that does not wait is made when it is needed."""
        self._default = self._new_request(None, None, None, True, self._weight)
        self._immediate = None

    def _refusal(self) -> Callable[[Answer, int], SyncError]:
        """Return a function that makes the error for a request of some weight that the server did not admit.

        It must not refer to this object, which has requests: that would be a cycle.
        """
        return never_refused

    async def _attach(self, token: str, ttl: Seconds | None) -> L:
        """Take up a detached lease, as `AsyncLock.attach` says."""
        by_scripts(self._keys.engine, "attach()")
        request = self._new_request(ttl, None, None, False, self._weight)
        request = replace(request, shared=False, replaced=token_of(token, self._keys))

        def granting(_: object = None) -> Coroutine[Any, Any, Grant | None]:
            return acquire(self._resource(), request)

        observers = self._resource().hub.observing.observers
        grant = await (
            granting()
            if observers is None
            else observers.follow(self._kind, self.name, granting, label=self._shown_label(None))
        )
        if grant is None:
            raise NotHeld(
                f"the lease on {self.name!r} cannot be attached: it was attached before, or ended. Do not go on "
                "with its work; acquire the lock"
            )
        return self._lease_type(grant, self._itself)

    async def _grant(self, request: Request, within: float | None) -> Grant:
        grant = await self._try(request, within)
        return await self._refuse(request) if grant is None else grant

    async def _refuse(self, request: Request) -> NoReturn:
        """Raise the error for a request that does not wait, when it is taken."""
        self._taken(request, await self._data())

    async def _data(self) -> str | None:
        """Describe the key of a lock if that is no lock, and has no ttl."""
        return None

    def _taken(self, request: Request, data: str | None) -> NoReturn:
        permits = request.weight and request.limit != WRITER_WEIGHT
        raise AcquireTimeout.taken(
            self.name,
            remaining=None if self._latest_resource is None else self._latest_resource.holder_remaining(),
            weight=request.weight if permits else 0,
            data=data,
        )

    async def _tried(self, request: Request) -> L | None:
        grant = await self._try(request, None)
        return None if grant is None else self._lease_type(grant, self._itself)

    def _try(
        self, request: Request, within: float | None, observation: Observation | None = None
    ) -> Coroutine[Any, Any, Grant | None]:
        resource = self._resource()
        if observation is None and (observers := resource.hub.observing.observers) is not None and self._kind:
            return observers.follow(
                self._kind,
                resource.name,
                partial(self._try, request, within),
                self._pattern,
                label=text(request.label[: -len(LABEL_MARK)]),
            )
        if resource.leases and request.wait and request.identity is None:
            resource.check_waits(request)
        if not request.shared:
            return self._acquire_alone(resource, request, within)
        if not resource.hub.pushes:
            return self._acquire_alone(resource, replace(request, shared=False), within)
        cohort = cohort_of(resource, request)
        if request is self._default:
            self._cohort = cohort
        return acquire_shared(cohort, request, current_task(cohort.loop), within, observation)

    def _acquire_alone(
        self, resource: Resource, request: Request, within: float | None
    ) -> Coroutine[Any, Any, Grant | None]:
        """Acquire for one task, which shares nothing."""
        return acquire(resource, request, within)


class PermitPrimitive(Primitive[L]):
    """Base of the primitives that consist of permits."""

    async def force_release(self) -> int:
        """Take the permits away from all holders of this moment, and return how many leases that ended.

        The next waiters get them. A living holder keeps running until its next renewal, and loses its lease then
        (reason "expired" or "taken"): let the protected resource check the fence. A holder that comes meanwhile keeps
        what it has. Two round trips, and one more for each 100 holders; at most 10,000 holders.

        Raises:
            Unreachable: A reply was lost. Some permits may or may not have been taken away.
            CommandRefused, CoordinatorClosed, WrongContext: As for `acquire`.

        On cancellation some permits may or may not have been taken away.
        """
        held = (await self._at_work().look(self._keys, MOST_FORCED)).holders
        tokens = [bytes_of(it.token) for it in held if self._access in (None, it.access)]
        ended = 0
        for first in range(0, len(tokens), FORCED_AT_ONCE):
            ended += sum(await gather(*map(self._release_token, tokens[first : first + FORCED_AT_ONCE])))
        return ended

    async def _limit_and_queue(self) -> tuple[int, int]:
        """Return the limit on the server, 0 if it knows none, and how many requests are queued."""
        _, state, queue, _ = self._keys.all
        asked: tuple[Words, ...] = ((b"HMGET", state, b"limit", b"used", b"fence"), (b"PTTL", state), (b"ZCARD", queue))
        try:
            _, fields, left, waiting = checked(await self._at_work().read(self._keys, *asked))
            return state_alone(state, fields, left)[0], waiting
        except ReplyError as error:
            raise refusal(self._keys.name, str(error), keys=self._keys.all) from None


# -- Requests that are made of several, which observers see as one ---------------------------------------------


G = TypeVar("G", bound=Grant)


async def followed(
    hub: Hub,
    kind: str,
    names: Sequence[str],
    granting: Callable[[], Awaitable[G | None]],
    *,
    waits: bool,
    label: str = "",
) -> G | None:
    """Await the result of ``granting``, and tell the observers of ``hub``, if any, the outcome of this request.

    ``waits``: whether it waits for other holders. ``label``: of the request.
    """
    observers = hub.observing.observers
    if observers is None:
        return await granting()
    pattern = observers.pattern_of_all(names)
    return await observers.follow(kind, ", ".join(names), lambda _: granting(), pattern, waits=waits, label=label)

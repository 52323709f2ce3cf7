"""The link to a cluster: a link to each of its shards, opened when a command is to be sent there.

Calls that share a name are executed in the order of `send`. While the slot of the name stays where it is, all of them
take the same link. After the slot has moved, the old node answers the calls that it still gets, usually with MOVED, and
they are sent through the new link; new calls stay behind them. So no call overtakes another.

While a slot is being moved, the server answers TRYAGAIN or ASK, because some keys of a name usually do not exist. The
call is sent again until the slot has moved, or its time is up. So no lease of that slot is renewed meanwhile.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import get_ident

from redis.crc import key_slot

from .._client.cluster import Cluster, Shard, not_now
from .._client.replies import Reply, ReplyError
from .._core import logs
from .._core.cancellation import cancelled
from .._core.keys import Endpoint, Keys
from .call import MAYBE_LATER, REFUSED, Call, too_late
from .connection import Connection
from .link import Link, LinkOptions, LinkOwner
from .witness import Witness

# -- The link to one shard of a cluster ------------------------------------------------------------------------


class ShardLink(Link):
    """Carries calls to one shard, and hands those on whose slot has moved."""

    def __init__(
        self,
        links: ClusterLink,
        shard: Shard,
        endpoint: Endpoint,
        owner: LinkOwner,
        options: LinkOptions,
    ) -> None:
        super().__init__(shard.client, endpoint, owner, options)
        self._links = links
        self._shard = shard

    def concerns(self, keys: Keys) -> bool:
        """Return whether calls on ``keys`` go through this link."""
        return self._links.shard_of(keys) is self._shard

    def _send_again(self, call: Call) -> None:
        self._links.link_of(call.keys).send(call)

    def _send_behind(self, call: Call) -> None:
        self._links.send(call)

    def _interpret(self, message: str) -> str:
        code, _, rest = message.partition(" ")
        if code == "CLUSTERDOWN":
            self._links.down(self._shard)
        if code not in ("MOVED", "ASK"):
            return message
        slot, _, address = rest.partition(" ")
        if code == "MOVED":
            self._links.redirected(address)
        return f"TRYAGAIN {not_now(code, slot, address)}"

    def in_shard(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with an inbox in a slot that the shard has, as far as is known."""
        return endpoint.in_shard(lambda inbox: self._links.cluster.shard_at(key_slot(inbox)) is self._shard)

    async def check(self, connection: Connection) -> None:
        """Raise unless the connection leads to the primary."""
        if connection.leads_to != self._shard.address:
            raise ConnectionResetError("the primary of these slots became another node meanwhile")

    def _on_push(self, push: list[Reply]) -> None:
        if push[0] != b"sunsubscribe":
            super()._on_push(push)
            return
        # The slot of the inbox has left this node, or the node is no primary any more: sooner than MOVED says so. The
        # node was told who has the slot, so it is asked first when the next connection is opened, which gets another
        # inbox.
        why = "the slot of its inbox has another node now"
        self._links.cluster.lost(self._shard.address)
        if self._connector.opening is not None:
            self._connector.opening.drop(ConnectionResetError(why))
        self.drop(why)

    def ping(self, connection: Connection) -> None:
        """Ask about a name that is held or waited for here, so that the answer says if its slot has moved.

        A lease without a ttl asks nothing by itself, and this node may be removed from the cluster.
        """
        keys = next(filter(self.concerns, self._owner.keys_in_use()), None)
        if keys is None:
            super().ping(connection)
        else:
            connection.ask((b"PTTL", keys.all[0])).add_done_callback(self._pinged)

    def _pinged(self, answer: asyncio.Future[Reply]) -> None:
        if not answer.cancelled() and isinstance(error := answer.exception(), ReplyError):
            self._interpret(str(error))

    def _put_back(self, connection: Connection) -> None:
        super()._put_back(connection)
        self._hand_on()

    def _on_lost(self, connection: Connection, error: Exception | None) -> None:
        super()._on_lost(connection, error)
        if not self._connector.active and not self._closed:
            self._links.refresh_soon()  # perhaps the node was removed for good

    def calls(self) -> list[Call]:
        """Return all calls that wait or are in flight."""
        in_flight = () if self._connection is None else self._connection.unanswered()
        calls = [*self._queue.calls(), *(call for call, _ in in_flight)]
        return [call for call in calls if not call.over]

    def keep_behind(self, call: Call) -> bool:
        """Keep a new call about a name that has moved if this link has an earlier one about it; return whether so."""
        if self._deferred.keep_behind(call):
            return True
        has_earlier = any(earlier.name == call.name for earlier in self.calls())
        if has_earlier:
            self._deferred.hold(call)
        return has_earlier

    def settle(self) -> None:
        """Adapt to moved slots: connect to the new primary, and hand calls that have another shard now to its link."""
        if self._connection is not None and self._connection.leads_to != self._shard.address:
            self.drop("the primary of these slots is another node now")
        elif self._connection is None and not self._connector.active:
            self._connector.error = None  # it may be about another node
        self._hand_on()

    def _hand_on(self) -> None:
        """Hand unsent calls that have another shard now to its link."""
        if not self._closed:
            self._queue.hand_on(lambda call: self.concerns(call.keys))


RETIRING = 0.25
"""Seconds between two checks whether the link to a shard without slots may be closed."""


class ClusterLink:
    """Carries calls to the shards of a cluster, in order for each name."""

    def __init__(
        self,
        cluster: Cluster,
        endpoint: Endpoint,
        owner: LinkOwner,
        options: LinkOptions,
    ) -> None:
        self.cluster = cluster
        self._endpoint = endpoint
        self._owner = owner
        self._options = options
        self._links: dict[Shard, ShardLink] = {}
        self._left: dict[bytes, list[ShardLink]] = {}  # by moved name: links that may still have calls of it
        self._refreshing: asyncio.Task[None] | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        cluster.subscribe(self.slots_moved)

    def send(self, call: Call) -> None:
        """Send ``call`` to the shard that has its keys."""
        if self._closed:
            too_late(call)
            return
        link = self.link_of(call.keys)
        if self._left and call.name in self._left:
            if any(left.keep_behind(call) for left in self._left[call.name] if left is not link):
                return
            del self._left[call.name]
        link.send(call)

    def link_of(self, keys: Keys) -> ShardLink:
        """Return the link to the shard that has ``keys``, as far as is known."""
        return self.link_to(self.shard_of(keys))

    def link_to(self, shard: Shard) -> ShardLink:
        """Return the link to ``shard``."""
        link = self._links.get(shard)
        if link is None:
            endpoint = self._endpoint.at(shard.number)
            link = self._links[shard] = ShardLink(self, shard, endpoint, self._owner, self._options)
        return link

    def shard_of(self, keys: Keys) -> Shard:
        """Return the shard that has ``keys``, as far as is known."""
        return self.cluster.shard_at(key_slot(keys.all[0]))

    def endpoint_of(self, keys: Keys) -> Endpoint:
        """Return the endpoint by which the shard that has ``keys`` knows us."""
        shard = self.shard_of(keys)
        link = self._links.get(shard)
        return self._endpoint.at(shard.number) if link is None else link.endpoint_of(keys)

    def connection_error_of(self, keys: Keys) -> Exception | None:
        """Return why there is no connection to the shard that has ``keys``; None if there is one."""
        link = self._links.get(self.shard_of(keys))
        return None if link is None else link.connection_error

    def answering(self, keys: Keys, stalled: bool) -> bool:
        """Return True if the shard that has ``keys`` is known to answer; ``stalled``: as `Link.answering`."""
        link = self._links.get(self.shard_of(keys))
        return link is not None and link.answering(keys, stalled)

    def witness_of(self, keys: Keys) -> Witness:
        """Return the witness of the shard that has ``keys``, as far as is known."""
        return self.link_of(keys).witness_of(keys)

    @property
    def connection_error(self) -> Exception | None:
        """The reason that there is no connection to some shard; None if there is one to each."""
        return next((error for link in self._links.values() if (error := link.connection_error) is not None), None)

    @property
    def alone(self) -> bool:
        """True if no earlier connection to any shard can still have unread commands of ours."""
        return all(link.alone for link in self._links.values())

    @property
    def connections(self) -> int:
        """Number of connections that were opened so far."""
        return sum(link.connections for link in self._links.values())

    # -- moved slots -----------------------------------------------------------------------------------

    def redirected(self, address: str) -> None:
        """Note that a slot has moved, perhaps to ``address``, and ask the nodes about all slots."""
        self.cluster.moved(address)
        self.refresh_soon()

    def down(self, shard: Shard) -> None:
        """Note that the primary of ``shard`` said that the cluster is down, and ask other nodes who the primary is."""
        self.cluster.down(shard.address)
        self.refresh_soon()

    def refresh_soon(self) -> None:
        """Ask the nodes in the background which shard has which slots."""
        if self._refreshing is None and not self._closed:
            self._refreshing = asyncio.Task(self._refresh(), name="redis_sync_aio cluster")
            self._refreshing.add_done_callback(self._refresh_ended)

    async def _refresh(self) -> None:
        async with asyncio.timeout(self._options.connect_timeout):
            await self.cluster.refresh()

    def _refresh_ended(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and (error := task.exception()) is not None:  # the next MOVED asks again
            expected = isinstance(error, (*MAYBE_LATER, *REFUSED))
            logs.log("slots_unknown", level=logs.INFO if expected else logs.WARNING, why=error)

    def slots_moved(self) -> None:
        """Adapt to slots that have another shard now, or shards that have another primary; runs in any thread."""
        if self._thread == get_ident() and self._loop.is_running():
            self._slots_moved()
        else:  # in another thread, or while another loop of this thread runs
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._slots_moved)

    def _slots_moved(self) -> None:
        if self._closed:
            return
        self._left = {}
        for link in list(self._links.values()):
            for name in {call.name for call in link.calls() if not link.concerns(call.keys)}:
                self._left.setdefault(name, []).append(link)
        for link in list(self._links.values()):  # their waiting calls go first
            link.settle()
        self._owner.link_moved()
        in_use = {self.shard_of(keys) for keys in self._owner.keys_in_use()}
        for shard in in_use:  # a lease without a ttl would send nothing there
            self.link_to(shard).connect()
        for shard in list(self._links):
            if shard.gone:
                self._retire(shard)

    def _retire(self, shard: Shard) -> None:
        """Close the link to a shard that has lost all its slots, once none of its calls is unanswered."""
        link = self._links.get(shard)
        if link is None or self._closed:
            return
        if link.calls():
            self._loop.call_later(RETIRING, self._retire, shard)
            return
        del self._links[shard]
        for call in link.detach():
            self.send(call)
        self._left = {name: links for name, links in self._left.items() if link not in links}

    # -- the end ---------------------------------------------------------------------------------------

    def detach(self) -> list[Call]:
        """End all connections and hand over all calls that were not answered."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        return [call for link in self._links.values() for call in link.detach()]

    def after_fork(self) -> None:
        """Give up everything in a forked child, without using or closing what belongs to the parent."""
        self._closed = True
        for link in self._links.values():
            link.after_fork()

    def close_without_loop(self) -> None:
        """End the connections after the event loop was closed."""
        self._closed = True
        for link in self._links.values():
            link.close_without_loop()

    async def close(self) -> None:
        """Close all connections; calls in flight end with CoordinatorClosed."""
        self._closed = True
        if self._refreshing is not None:
            await cancelled(self._refreshing)
        await asyncio.gather(*(link.close() for link in self._links.values()))

"""The link to one shard of a cluster."""

from __future__ import annotations

import asyncio
from typing import Protocol

from .._client.cluster import Cluster, Shard
from .._client.cluster_nodes import not_now
from .._client.error_replies import error_code
from .._client.resp import Reply, ReplyError
from .._core.clock import now
from .._core.keys import Endpoint, Keys
from .asking import Asking
from .call import Call
from .connection import Connection
from .executor import LinkOptions, LinkOwner
from .link import Link


class ShardRouter(Protocol):
    """The links of a cluster, as the link to one of its shards sees them."""

    cluster: Cluster

    def shard_of(self, keys: Keys) -> Shard:
        """Return the shard that has ``keys``, as far as is known."""
        ...

    def link_of(self, keys: Keys) -> Link:
        """Return the link to the shard that has ``keys``, as far as is known."""
        ...

    def send(self, call: Call) -> None:
        """Send ``call`` to the shard that has its keys, behind earlier calls about its name."""

    def redirected(self, address: str) -> None:
        """Note that a slot has moved, perhaps to ``address``, and ask the nodes about all slots."""

    def down(self, shard: Shard) -> None:
        """Note that the primary of ``shard`` said that the cluster is down, and ask other nodes who the primary is."""

    def refresh_soon(self) -> None:
        """Ask the nodes in the background which shard has which slots."""


class ShardLink(Link):
    """Carries calls to one shard, and hands those on whose slot has moved."""

    def __init__(
        self,
        links: ShardRouter,
        shard: Shard,
        endpoint: Endpoint,
        owner: LinkOwner,
        options: LinkOptions,
    ) -> None:
        super().__init__(shard.client, endpoint, owner, options)
        self._links = links
        self._shard = shard
        self._asking = Asking(links.cluster.nodes, self._converse, self._response_timeout, self._not_answered)

    def concerns(self, keys: Keys) -> bool:
        """Return whether calls on ``keys`` go through this link."""
        return self._links.shard_of(keys) is self._shard

    def _send_again(self, call: Call) -> None:
        self._links.link_of(call.keys).send(call)

    def _send_behind(self, call: Call) -> None:
        self._links.send(call)

    def _on_error(self, call: Call, message: str) -> None:
        code, connection = error_code(message), self._connection
        if code in ("TRYAGAIN", "ASK") and connection is not None and not call.over:
            watch = self._no_scripts != "" or call.keys.engine == "watch"
            if code == "ASK" and call.narrowed:
                self._asking.follow(call, message, watch)
                return
            if call.narrow():
                call.sent = now()
                call.attempts -= 1  # it was not executed
                if watch:
                    self._send_watching(connection, call)
                else:
                    connection.send(call)
                return
        if code != "NOSCRIPT":
            call.widen()  # after MOVED the new node has all keys
        super()._on_error(call, message)

    def _not_answered(self, call: Call, message: str) -> None:
        """Defer a call that the new node of its slot did not answer either."""
        call.widen()
        super()._on_error(call, message)

    def take_unsent(self) -> list[Call]:
        """Hand over all calls that wait, or follow an ASK."""
        return [*self._asking.take(), *super().take_unsent()]

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

    async def check(self, connection: Connection) -> None:
        """Raise unless the connection leads to the primary."""
        if connection.leads_to != self._shard.address:
            raise ConnectionResetError("the primary of these slots became another node meanwhile")

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
        for call, _ in connection.unanswered():
            call.widen()
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

"""Every error says what to do, and every message of errors and of the log is quoted."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import redis_sync_aio
from redis_sync_aio import Coordinator, LeaseLost
from redis_sync_aio.embedded import EmbeddedServer
from redis_sync_aio.errors import LossReason

from ..support.log_lines import lines
from ..support.wrong import ERRORS, LINES, Situation

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "when-it-goes-wrong.md"
ASSETS = PAGE.parents[1] / "assets"
OF_REDIS_PY = {"LockError", "LockNotOwnedError"}
"""Errors of redis-py that `compat.Lock` raises: `Unreachable` is its ConnectionError anyway."""

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not next to these tests")


def entries(heading: str) -> dict[str, str]:
    """The text below each ``###`` of the sections whose ``##`` begins with ``heading``."""
    sections = re.findall(rf"^## {heading}.*\n((?:(?!## ).*\n?)*)", PAGE.read_text("utf-8"), re.M)
    found = re.findall(r"^### `?(\w+)`?(?: \{ #[\w-]+ \})?\n((?:(?!### ).*\n?)*)", "\n".join(sections), re.M)
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def quoted(messages: str) -> dict[str, list[str]]:
    """What the list of messages, which a page puts in, says for each name."""
    found: dict[str, list[str]] = {}
    for message in messages.strip().split("\n\n"):
        name, _, said = message.partition(": ")
        found.setdefault(name, []).append(plain(said.partition("\n    facts: ")[0]))
    return found


def plain(message: str) -> str:
    """A message in one line; its numbers, and the name of this machine, are not compared."""
    return re.sub(
        r"\d+", "0", re.sub(r"\s+", " ", message.replace(f" {socket.gethostname()[:32]}:", " web-3:"))
    ).strip()


MESSAGES = quoted((ASSETS / "messages-of-errors.txt").read_text("utf-8")) if PAGE.exists() else {}
LOGGED = quoted((ASSETS / "messages-of-the-log.txt").read_text("utf-8")) if PAGE.exists() else {}


def public_errors() -> dict[str, type[BaseException]]:
    """The exceptions that public modules export, wherever they are defined."""
    found: dict[str, type[BaseException]] = {}
    for info in pkgutil.walk_packages(redis_sync_aio.__path__, "redis_sync_aio."):
        if any(part.startswith("_") for part in info.name.split(".")) or ".cli" in info.name:
            continue
        module = importlib.import_module(info.name)
        exported = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        found |= {name: it for name, it in exported.items() if inspect.isclass(it) and issubclass(it, BaseException)}
    return found


def test_every_public_error_is_met_and_no_other() -> None:
    assert {"LeaseLost", "ServerNotFound", "QueueFull"} < public_errors().keys()
    assert set(ERRORS) == public_errors().keys() | OF_REDIS_PY
    assert all(f"**`{name}`**: " in PAGE.read_text("utf-8") for name in OF_REDIS_PY)


def test_every_reason_of_a_loss_has_an_entry_and_nothing_else_has() -> None:
    """`forgotten` is the reason of an event only."""
    assert set(entries("Why was my lease lost")) == {*get_args(LossReason), "forgotten"}


LOSSES: dict[str, list[LossReason | dict[str, Any]]] = {
    "late": [{"reason": "late", "stalled": 31.2}, "late"],
    "unreachable": ["unreachable", {"reason": "unreachable", "claim": 4.5, "held_for": 4.5}],
    "expired": [{"reason": "expired", "time_is_up": True}, "expired"],
    "taken": ["taken"],
    "closed": ["closed"],
    "released": ["released"],
    "forgotten": [],
}
"""What is quoted in the entry of a reason, in this order: facts of a loss, or only the reason."""


@pytest.mark.parametrize("reason", LOSSES)
def test_the_messages_of_a_loss_are_quoted(reason: str) -> None:
    """So the search of the site finds them."""
    of_all: dict[str, Any] = {"name": "orders:42", "fence": 1795711537967982, "held_for": 41.3}
    facts: list[dict[str, Any]] = [{"reason": it} if isinstance(it, str) else it for it in LOSSES[reason]]
    wanted = [plain(str(LeaseLost(**of_all | more))) for more in facts]
    assert MESSAGES.get(f"LeaseLost, {reason}", []) == wanted


def test_every_error_says_in_which_state_and_what_to_do() -> None:
    """In the docstring of its class. No lock has to do with the errors of the embedded server."""
    texts = {name: " ".join(inspect.cleandoc(kind.__doc__ or "").split()) for name, kind in public_errors().items()}
    assert {name for name, text in texts.items() if not re.search(r"\*\*State:\*\* \w", text)} == {
        "ServerNotFound",
        "ServerNotStarted",
    }
    assert [name for name, text in texts.items() if not re.search(r"\*\*Do:\*\* [\w`]", text)] == []


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of this module: some errors are met by another configuration, or by users with few rights."""
    with EmbeddedServer(port=0) as running:
        yield running


@pytest.mark.timing
@pytest.mark.parametrize("name", ERRORS)
async def test_the_quoted_message_is_that_of_the_error(own: EmbeddedServer, name: str) -> None:
    """Each error is met on a real server; the end of one message is left out."""
    async with own.client() as redis:
        await redis.flushall()
        async with Coordinator(redis) as sync, Coordinator(redis) as other:
            with pytest.raises(Exception) as raised:
                await ERRORS[name](Situation(own, redis, sync, other))
    assert type(raised.value).__name__ == name
    (said,) = MESSAGES["LeaseLost, taken" if name == "LeaseLost" else name]
    assert plain(str(raised.value)).startswith(said)
    assert name == "ServerNotStarted" or plain(str(raised.value)) == said


def test_every_error_and_every_line_of_the_log_is_met_and_quoted() -> None:
    assert set(ERRORS) - {"LeaseLost"} == {name for name in MESSAGES if not name.startswith("LeaseLost, ")}
    assert set(LINES) == set(LOGGED) == set(lines())


@pytest.mark.parametrize("event", LINES)
def test_the_quoted_line_is_that_of_the_log(event: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "redis_sync_aio"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        LINES[event]()
    (record,) = caplog.records
    assert vars(record)["event"] == event
    assert [plain(record.getMessage())] == LOGGED[event]


def test_a_message_that_has_changed_is_noticed() -> None:
    message = "NotHeld: this task holds no lease on 'orders:42'"
    assert quoted(message) == quoted(message.replace("42", "7"))
    assert quoted(message) != quoted(message.replace("holds no lease", "has no lease"))

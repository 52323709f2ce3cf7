"""What contestants and scenarios are called in pictures, for people who do not know this code."""

from __future__ import annotations

from typing import NamedTuple

from .pictures import Better

LABELS = {
    "ours": "redis_sync_aio",
    "ours-shared": "redis_sync_aio, sharing",
    "ours-lingering": "redis_sync_aio, sharing, lingering",
    "ours-lock": "redis_sync_aio, plain lock",
    "ours-coarse": "redis_sync_aio, whole market watched",
    "coarse-lock": "one lock for everything",
    "fine-lock": "a lock for each item",
    "redis-py": "redis-py",
    "redis-py-fine": "redis-py, watching one item",
    "redis-fifo-lock": "redis-fifo-lock",
    "python-redis-lock": "python-redis-lock (threads)",
    "self-limiters": "self-limiters",
    "async-redis-rate-limiters": "async-redis-rate-limiters",
    "py-redis-semaphore": "py-redis-semaphore",
    "steindamm": "steindamm",
    "sorted-set": "sorted set, polled",
    "raw-client": "no queue, no lease: redis-py client",
    "raw-connection": "no queue, no lease: one connection",
    "raw-protocol": "no queue, no lease: bare protocol",
    "raw-semaphore": "no lease: bare counter",
    "asyncio-lock": "asyncio.Lock, without Redis",
    "hop": "bare message, no lock",
    "no-lock": "no lock at all",
}
"""The names of the contestants."""


class Words(NamedTuple):
    """What a scenario is called, what its figure is, and which sense is better."""

    title: str
    unit: str
    better: Better


_FAIR = "grants a second x fairness among tasks"
_BOUGHT = "purchases a second"
WORDS = {
    "s1": Words("A single task takes and releases a lock", "acquire-release pairs a second", "more"),
    "s2": Words("100 tasks, each with a lock of its own", "acquire-release pairs a second", "more"),
    "s2sem": Words("100 tasks, each with a semaphore of its own", "acquire-release pairs a second", "more"),
    "s3": Words("32 tasks in 2 processes want one lock, nothing to do inside", _FAIR, "more"),
    "s3work": Words("32 tasks in 2 processes want one lock, 1\u00a0ms of work inside", _FAIR, "more"),
    "s3one": Words("32 tasks of one process want one lock, nothing to do inside", _FAIR, "more"),
    "lone": Words("One task against 64 busy ones of another process", "wait in ms that 99 of 100 stay below", "less"),
    "handover": Words("From the release in one process to the grant in another", "microseconds, median", "less"),
    "s4": Words("100 tasks wait for one lock, then get it in turn", "milliseconds until all had it", "less"),
    "s4sem": Words("100 tasks wait for a semaphore of 5, then get it", "milliseconds until all had it", "less"),
    "s5": Words("32 tasks in 2 processes want a semaphore of 5, nothing to do inside", _FAIR, "more"),
    "s5work": Words("32 tasks in 2 processes want a semaphore of 5, 1\u00a0ms of work inside", _FAIR, "more"),
    "cost": Words("A semaphore while 100,000 permits are held", "microseconds an acquire-release pair", "less"),
    "rw": Words("31 readers and 1 writer in 2 processes, 1\u00a0ms of work inside", "grants a second", "more"),
    "s6": Words("Tasks are cancelled while they acquire", "ms until all locks are usable again", "less"),
    "s7": Words("A holder is killed", "ms from lease end to next grant", "less"),
    "s8": Words("A market with 5 sellers and 5 buyers", _BOUGHT, "more"),
    "s8s1b5": Words("A market with 1 seller and 5 buyers", _BOUGHT, "more"),
    "s8s5b1": Words("A market with 5 sellers and 1 buyer", _BOUGHT, "more"),
    "s8s1b1": Words("A market with 1 seller and 1 buyer", _BOUGHT, "more"),
    "tx": Words("A transaction without competition", "microseconds a transaction", "less"),
    "guarded": Words("A write, under a lease (redis-py: without)", "microseconds a commit", "less"),
}
"""The words of each scenario, by its key."""

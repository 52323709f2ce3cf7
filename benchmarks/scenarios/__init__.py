"""The scenarios, in the order in which they are run."""

from __future__ import annotations

from ..scenario import Scenario
from .cancellation import CANCELLATION
from .contention import CONTEST, CONTEST_IN_ONE, CONTEST_WITH_WORK
from .cost import COST
from .crash import CRASH
from .handover import HANDOVER
from .lone import LONE
from .market import MARKETS
from .permits import SHARE, SHARE_WITH_WORK
from .readers import READ_MOSTLY
from .throughput import MANY, MANY_SEMAPHORES, ONE
from .transactions import GUARDED, TRANSACTION
from .waiting import WAITING, WAITING_FOR_PERMITS

ALL: tuple[Scenario, ...] = (
    ONE, MANY, CONTEST, CONTEST_WITH_WORK, CONTEST_IN_ONE, LONE, HANDOVER, WAITING, CANCELLATION, CRASH,
    SHARE, SHARE_WITH_WORK, MANY_SEMAPHORES, WAITING_FOR_PERMITS, COST, READ_MOSTLY,
    *MARKETS, TRANSACTION, GUARDED,
)  # fmt: skip
BY_KEY = {scenario.key: scenario for scenario in ALL}

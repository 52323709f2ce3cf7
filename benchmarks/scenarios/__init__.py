"""The scenarios, in the order in which they are run."""

from __future__ import annotations

from ..runner import Scenario
from .cancellation import CANCELLATION
from .contention import CONTEST, CONTEST_IN_ONE, CONTEST_WITH_WORK
from .crash import CRASH
from .handover import HANDOVER
from .throughput import MANY, ONE
from .waiting import WAITING

ALL: tuple[Scenario, ...] = (
    ONE, MANY, CONTEST, CONTEST_WITH_WORK, CONTEST_IN_ONE, HANDOVER, WAITING, CANCELLATION, CRASH
)  # fmt: skip
BY_KEY = {scenario.key: scenario for scenario in ALL}

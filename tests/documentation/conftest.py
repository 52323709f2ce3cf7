"""Tests here run in virtual time, but for those marked real; the code of pages has loops of its own."""

from ..support.virtual import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

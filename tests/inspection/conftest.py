"""Tests here run in virtual time, but for those marked real."""

from ..support.virtual import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

"""Tests here run in virtual time, but for those marked real: web servers listen on sockets."""

from ..support.virtual import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories

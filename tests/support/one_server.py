"""For tests of what does not depend on it: one server, or databases of it, in the place of a Redlock's servers."""

from __future__ import annotations

import pytest

from .inside import majority, redlock


@pytest.fixture(autouse=True)
def one_server_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take clients as they come; else they would be refused, as test_redlock tells."""

    def independent(*_: object) -> None:
        """Say nothing."""

    monkeypatch.setattr(redlock, "check_apart", lambda _: None)
    monkeypatch.setattr(majority, "check_independent", independent)

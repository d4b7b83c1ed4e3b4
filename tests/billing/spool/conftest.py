from __future__ import annotations

import pytest


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the spool sync in threads, as where the kernel syncs nothing by itself."""
    monkeypatch.setattr("billing.spool.sync._kernel", lambda: None)

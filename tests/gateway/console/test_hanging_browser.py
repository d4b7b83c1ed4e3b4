"""A browser that hangs costs its test a minute, and no other one anything."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from playwright.sync_api import expect

from tests.gateway.console import conftest
from tests.gateway.console.conftest import Visit


def test_a_browser_that_stops_is_killed(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "CLOSE_S", 3.0)
    visit("little", "owner", "/console/keys")
    for child in psutil.Process().children(recursive=True):
        if "chromium" in child.name() and child.parent().name() != child.name():
            os.kill(child.pid, signal.SIGSTOP)


def test_the_next_test_has_another_one(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/keys")
    expect(tab.get_by_role("main")).to_be_visible()

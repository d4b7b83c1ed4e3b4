"""Finds the settings that the running `tollgate up` of a home has in force: its file's, wherever
that is, with what operators added."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec

from gateway.cli.shared.command import STATE, run
from gateway.home import Home
from gateway.settings.load import Settings, load, restore

CONNECT_TIMEOUT_S = 2.0


def find_running(home: Home) -> Settings | None:
    """Return the settings in force in a home; None: nothing runs there."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(str(home.control_socket))
        return restore(home.worker_settings).settings
    except (OSError, msgspec.MsgspecError):
        return None


def in_force(settings: Settings) -> Settings:
    """Return the settings that run for the home of `settings`; else these."""
    return find_running(Home(settings.home)) or settings


def with_settings_in_force(
    command: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Make a command as `with_settings` does, which gets the settings in force."""

    @wraps(command)
    def invoke(home: Path | None, config: Path | None, **own: Any) -> None:
        run(command(in_force(load({"home": home, "config": config})), **own))

    for option in reversed(STATE):
        option(invoke)
    return invoke

"""The live part of the settings: what a running worker takes up without being replaced.

Everything else is fixed when a process starts (`gateway.settings.changes.EFFECTS`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gateway.lanes import LaneDeadlines, LaneSlos
from gateway.principal import Plan
from gateway.settings.file import CompatConfig, WrittenMcp, WrittenWebhook
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig
from gateway.settings.origins import SettingOrigins


class LiveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The live part, by the names that `Settings` gives its fields."""

    models: tuple[ModelConfig, ...]
    mcp: WrittenMcp
    deadlines: LaneDeadlines
    slo: LaneSlos
    compat: CompatConfig
    plans: tuple[Plan, ...]
    webhooks: tuple[WrittenWebhook, ...] = ()
    price_books: tuple[Path, ...]
    """Their content may change while their paths stay."""
    stored_prices: dict[str, dict[str, Any]] = {}
    max_disputed_in_a_row: int
    disputed_rest_s: float
    origins: SettingOrigins = SettingOrigins()


def live_part(settings: Settings) -> LiveSettings:
    names = LiveSettings.__struct_fields__
    return LiveSettings(**{name: getattr(settings, name) for name in names})


def with_live_part(settings: Settings, live: LiveSettings) -> Settings:
    """Return `settings` with another live part. Of `mcp` and `compat`, what only a new process
    takes up stays as it is."""
    found = {name: getattr(live, name) for name in LiveSettings.__struct_fields__}
    found["mcp"] = msgspec.structs.replace(live.mcp, stdio=settings.mcp.stdio)
    hosted_tools = settings.compat.hosted_tools
    found["compat"] = msgspec.structs.replace(live.compat, hosted_tools=hosted_tools)
    return msgspec.structs.replace(settings, **found)


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's report to whoever started it, as a line of JSON: once it accepts connections,
    after it was told to read its settings again, and when it lets go of an engine."""

    number: int
    """The number of the settings in force here."""
    refused: int | None = None
    """The number of those that it cannot take up."""
    problem: str = ""
    """The reason, in a line."""
    engines: tuple[str, ...] = ()
    """The addresses of the engines that something here may still be asked of."""

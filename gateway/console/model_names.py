"""Names models to people: also what has no name of ours, and what is a server of tools."""

from __future__ import annotations

from gateway.settings.mcp_servers import priced_as
from gateway.telemetry.metrics import UNKNOWN_MODEL

NO_MODEL = "no model"
"""Stands for that of a request which named none, or none that is served: its name is not kept."""
CALLS = priced_as("")


def model_name(model: str) -> str:
    """Return what a model is called on a page."""
    if model in ("", UNKNOWN_MODEL):
        return NO_MODEL
    server = server_of(model)
    return model if server is None else f"tools of {server}"


def server_of(model: str) -> str | None:
    """Return the MCP server whose calls are booked under a name; None: it is a model's."""
    return model.removeprefix(CALLS) or None if model.startswith(CALLS) else None

"""Shows /console/settings: each setting in force, and where it comes from. For operators.

What may be a secret is shown nowhere: `gateway.settings.origins`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response

from gateway.console.tables import Table, TableColumn
from gateway.installation.items import read_stored
from gateway.installation.merge import StoredSetting
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.settings.origins import DEFAULT, shown

SHOWN = ("given", "all")
KINDS = {"model": "model", "mcp_server": "MCP server", "price_book": "price book",
         "deadlines": "deadline"}  # fmt: skip
MAX_VALUE = 200

page = ConsolePage(name="settings", title="Settings", letter="s", needs="operator:models")


def text_of(value: Any) -> str:
    """Return a value as the file has it, in short."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def content_of(stored: StoredSetting) -> str:
    pairs = (f"{name} = {text_of(shown(name, value))}" for name, value in stored.content.items())
    return "; ".join(pairs)


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    words, which = request.value("q").lower(), request.value("show", SHOWN)
    configuration = request.services.configuration
    origins = () if configuration is None else configuration.settings.origins.each
    found = [
        each
        for each in origins
        if (which == "all" or words or each.source != DEFAULT)
        and (not words or words in each.key.lower() or words in text_of(each.value).lower())
    ]
    async with request.system_db.connect() as conn:
        stored = await read_stored(conn)
    table = Table(
        "Settings",
        found,
        TableColumn("Setting", "key"),
        TableColumn("Value", lambda each: text_of(each.value)),
        TableColumn("From", "source"),
    )
    items = Table(
        "Stored by API",
        stored.items,
        TableColumn("What", lambda each: KINDS[each.kind]),
        TableColumn("Name", "name"),
        TableColumn("Content", content_of),
        TableColumn("Only of", "home"),
        TableColumn("Version", "version", kind="count"),
    )
    return request.render(
        "settings",
        table=table,
        tables={"items": items},
        num_given=sum(each.source != DEFAULT for each in origins),
        num_all=len(origins),
    )


routes = page.routes

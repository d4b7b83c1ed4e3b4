"""`tollgate mcp doctor`: asks each server what it offers, and says what keeps it from use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.mcp import adding, calling
from gateway.cli.mcp.offers import ORG, PROJECT, mcp, names_for, offered, org_of, server_of
from gateway.cli.shared.command import JSON, connections, with_options
from gateway.cli.shared.in_force import with_settings_in_force
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from mcp_bridge.upstream.stdio.stderr_tail import LastWords

__all__ = ["adding", "calling", "mcp"]


@mcp.command()
@with_settings_in_force
@with_options(ORG, PROJECT, JSON)
async def doctor(settings: Settings, org: str, project: str, as_json: bool) -> None:
    """Ask each server what it offers, and say what keeps it from being used.

    For a process that ended, also says how, and shows its last complaints. Exits with 1 if a server
    does not answer.
    """
    failed = False
    async with connections(settings) as (db, redis):
        org_id = await org_of(db, org, project)
        for name in names_for(settings, org_id):
            report = await examined(settings, db, redis, org_id, name)
            failed = failed or report["problem"] is not None
            click.echo(msgspec.json.encode(report) if as_json else in_words(report))
    if failed:
        raise Exit(1)


async def examined(
    settings: Settings, db: Any, redis: Any, org_id: str, name: str
) -> dict[str, Any]:
    """Ask a server.

    `problem`: why it cannot be asked; `ended` and `stderr`: of its process then, if there was one.
    """
    from gateway.mcp.admin.pins_admin import compared, of_others
    from gateway.mcp.pins import read_pins
    from mcp_bridge.trust.scan import worst
    from mcp_bridge.upstream.stdio.package_refs import unpinned

    config = server_of(settings, name)
    said: dict[str, Any] = {"server": name, "trust": config.trust, "problem": None}
    if config.launch is not None:
        said["unpinned"] = unpinned(config.launch.command, config.launch.args)
    ends: list[LastWords] = []
    async with db.connect() as conn:
        approved = await read_pins(conn, org_id=org_id, server=name)
        others = await of_others(conn, names_for(settings, org_id), org_id, name)
    try:
        offer = await offered(settings, config, org_id, db, redis, ends.append)
    except click.ClickException as error:
        said |= {"approved": len(approved.pins), "problem": error.message}
        return said | ({"ended": ends[-1].ended, "stderr": ends[-1].lines} if ends else {})
    waiting = (
        [] if config.trust == "all" else list(compared(config, approved, offer, others).found())
    )
    suspicious = [change.name for change, found in waiting if worst(found) == "high"]
    tools = [pin for pin in offer.pins.values() if pin.kind == "tool"]
    return said | {
        "tools": len(tools),
        "approved": len(approved.pins),
        "waiting": len(waiting),
        "suspicious": suspicious,
    }


def in_words(said: dict[str, Any]) -> str:
    """Show a report on a terminal."""
    from mcp_bridge.text_safety.hidden_text import visible

    drifts = [f"       not pinned: {each}" for each in said.get("unpinned", ())]
    if said["problem"] is not None:
        lines = [f"FAILS  {said['server']}: {said['problem']}"]
        if "ended" in said:
            lines += [f"       ended: {said['ended']}"]
            lines += [f"       stderr: {line}" for line in said["stderr"]]
        return "\n".join(map(visible, [*lines, *drifts]))
    parts = [f"{said['tools']} tools", f"{said['approved']} approved", f"{said['waiting']} wait"]
    if said["suspicious"]:
        parts.append("looks like an attack: " + ", ".join(said["suspicious"]))
    found = f"ok     {said['server']} ({said['trust']}): {', '.join(parts)}"
    return "\n".join(map(visible, [found, *drifts]))

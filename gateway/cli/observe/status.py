"""`tollgate status`: how a running installation is, asked over HTTP as any operator would."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from gateway.cli.shared.command import JSON, header_of, in_columns, refuse, with_settings
from gateway.home import Home
from gateway.processes.credentials_file import read
from gateway.settings.load import Settings

TIMEOUT_S = 10.0
COLUMNS = (("KIND", 8), ("NAME", 24), ("STATE", 12), ("SINCE", 16), ("DETAIL", 0))
EXIT_UNREADY = 1


@click.command()
@with_settings
@JSON
async def status(settings: Settings, as_json: bool) -> None:
    """Show the health of what requests depend on: spool, databases, engines and upstreams.

    With the admin key of credentials.json, what went wrong is shown too. Exit code: 0 ready or
    degraded, 1 not ready or not reachable.
    """
    known = read(Home(settings.home).credentials)
    if known is None:
        found = await ask(f"http://{settings.host}:{settings.port}", None)
    else:
        found = await ask(known.base_url.removesuffix("/v1"), known.admin_key)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        show(found)
    if found["status"] == "unready":
        sys.exit(EXIT_UNREADY)


async def ask(base: str, admin_key: str | None) -> dict[str, Any]:
    """Return what the gateway says: all of it to an operator, else what it tells everybody."""
    import httpx  # not for `--help`

    async with httpx.AsyncClient(base_url=base, timeout=TIMEOUT_S, trust_env=False) as http:
        try:
            if admin_key is not None:
                headers = {"authorization": f"Bearer {admin_key}"}
                answer = await http.get("/v1/admin/health", headers=headers)
                if answer.status_code == httpx.codes.OK:
                    return dict(answer.json())
            answer = await http.get("/health/ready")
            return dict(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            refuse(f"no gateway answers at {base}: {type(error).__name__}", status=1)


def show(found: dict[str, Any]) -> None:
    missing = f": it lacks {', '.join(found['missing'])}" if found["missing"] else ""
    click.echo(f"{found['status']}{missing}")
    parts = found.get("components", found.get("degraded", []))
    if parts:
        click.echo(header_of(COLUMNS))
    for part in parts:
        said = [part.get("detail"), last_error(part)]
        since = moment(part.get("since"))
        columns = (part["kind"], part["name"], part["state"], since)
        click.echo(in_columns((*columns, "; ".join(filter(None, said)) or "-"), COLUMNS))


def last_error(part: dict[str, Any]) -> str | None:
    if part.get("last_error") is None:
        return None
    return f"last error: {part['last_error']} ({moment(part.get('last_error_at'))})"


def moment(seconds: int | None) -> str:
    if seconds is None:
        return "-"
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M")

"""The wall from outside: an admin of one tenant asks every route there is for what is another's.

Routes are found in the route table. What a path names stands in `IDS`; a body is tried empty and
with a name. Nobody but Alice sees anything of hers, nothing of hers changes, and nothing fails.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar
from litestar.routes import HTTPRoute
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.invoicer import Invoicer
from foundation.periodic import Flusher, Periodic
from gateway.app.create import create_app, open_services
from gateway.app.sealed_rows import seal_unsealed
from gateway.cache_report.leases import CacheLeases
from gateway.home import Home
from gateway.routes.shared.access import SCOPE
from gateway.secret import Secret
from gateway.settings.load import load
from gateway.tenancy.keys.keys import ADMIN_PREFIX, PEPPER_PURPOSE, hash_key
from tests.gateway.walls.two_tenants import ALICE, IDS, MALLORY, populate, rows_of_alice

Route = tuple[str, str, list[str]]
KEY_OF = {org: f"{ADMIN_PREFIX}{org.removeprefix('org_'):0<43}" for org in (ALICE, MALLORY)}
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
SCOPES = ["admin:*", "usage:read", "inference", "mcp:call"]
BODIES: tuple[dict[str, str], ...] = ({}, {"name": "taken over"})
SEALED = ("/v1/responses/", "/v1/conversations/")
"""`populate` cannot seal the rows behind these paths; tests/gateway/responses show them to their
owner."""
SEALED_ENDS = "/arguments"
"""The arguments of a waiting call are sealed too: see tests/gateway/mcp/test_asked_arguments."""
OF_MESSAGES = "/v1/messages/batches/"
"""A batch has one of two shapes, so these are tried once theirs has this one."""
IN_THEIR_SHAPE = (
    """UPDATE batches SET endpoint = '/v1/messages',
        output_file_id = (SELECT min(id) FROM files f WHERE f.org_id = batches.org_id)""",
    "UPDATE files SET purpose = 'message_batch_results'",
)
REPORTS = ("/v1/organization/usage/", "/v1/organization/costs")
WINDOW = "&start_time=0&end_time=86400"
OTHERWISE = {"org_id", "api_key_id"}
"""In a path: whose resource it is; a key of a project, which the keys here are not."""

NEEDED = {"revocations", "probe"}
"""Work of a gateway's own without which it answers nobody; it changes no row."""


@pytest.fixture
async def columns(db: AsyncEngine) -> dict[str, str]:
    return await populate(db)


@pytest.fixture
async def app(
    db: AsyncEngine,
    columns: dict[str, str],
    postgres_url: str,
    redis_url: str,
    tmp_path: Path,
    patient: None,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Litestar]:
    # What a gateway does of itself (deliveries, sweeps, invoices, charges for leases) would look
    # like a change by the other tenant.
    for each in (Flusher, Invoicer, CacheLeases):
        monkeypatch.setattr(each, "start", lambda self: None)
    start = Periodic.start

    def start_needed(self: Periodic) -> None:
        if self._name in NEEDED:
            start(self)

    monkeypatch.setattr(Periodic, "start", start_needed)
    config = tmp_path / "t.toml"
    config.write_text('[[model]]\nname = "b"\nupstream = "http://127.0.0.1:1/v1"')
    environ = {"TOLLGATE_DATABASE_URL": postgres_url, "TOLLGATE_REDIS_URL": redis_url}
    settings = load({"home": tmp_path / "home", "config": config}, environ)
    Home(settings.home).create()
    secret = Secret.load_or_create(settings.secret_key_file).current
    pepper = secret.derive(PEPPER_PURPOSE)
    known = sa.text("""
        UPDATE api_keys SET key_hash = :hash, pepper_id = :pepper_id, prefix = :prefix,
            last_four = '0000', scopes = :scopes
        WHERE org_id = :org
    """)
    async with db.begin() as conn:
        for org, key in KEY_OF.items():
            values = {"org": org, "hash": hash_key(pepper, key), "pepper_id": secret.id}
            await conn.execute(known, {**values, "prefix": ADMIN_PREFIX, "scopes": SCOPES})
    await seal_unsealed(db, Secret.load(settings.secret_key_file))  # as a gateway does that starts
    made = create_app(settings)
    async with AsyncExitStack() as stack:
        made.state.services = await open_services(settings, stack, worker_id="0", metrics=None)
        yield made


def requests(app: Litestar) -> Iterator[Route]:
    """(method, path with Alice's ids, the names in it) of all that is not open."""
    for route in app.routes:
        assert isinstance(route, HTTPRoute)
        names = PARAMETER.findall(route.path_format)
        path = PARAMETER.sub(lambda found: IDS.get(found[1], "x"), route.path_format)
        for handler in route.route_handlers:
            if handler.opt.get(SCOPE) is not None:
                for method in sorted({str(each) for each in handler.http_methods}):
                    yield method, path, names


async def ask(
    client: httpx.AsyncClient, org: str, method: str, path: str
) -> AsyncIterator[httpx.Response]:
    for body in (None,) if method in ("GET", "HEAD", "DELETE") else BODIES:
        yield await client.request(
            method, path, json=body, headers={"authorization": f"Bearer {KEY_OF[org]}"}
        )


async def give_batches_their_shape(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        for statement in IN_THEIR_SHAPE:
            await conn.execute(sa.text(statement))


def by_shape(found: Iterable[Route], *, of_messages: bool) -> list[Route]:
    return [each for each in found if each[1].startswith(OF_MESSAGES) == of_messages]


async def test_nothing_of_another_tenant_is_shown_or_changed(
    app: Litestar, db: AsyncEngine, columns: dict[str, str]
) -> None:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for of_messages in (False, True):
            if of_messages:
                await give_batches_their_shape(db)
            before = await rows_of_alice(db, columns)
            paths = [each[:2] for each in by_shape(requests(app), of_messages=of_messages)]
            as_operator = [
                ("GET", f"{path}?org_id={ALICE}{WINDOW if path.startswith(REPORTS) else ''}")
                for method, path in paths
                if method == "GET"
            ]
            for method, path in (*paths, *as_operator):
                async for answer in ask(client, MALLORY, method, path):
                    what = f"{method} {path}: {answer.status_code} {answer.text}"
                    assert answer.status_code < 500, what
                    assert not answer.is_success or ALICE not in answer.text, what
            assert await rows_of_alice(db, columns) == before


async def test_to_its_owner_the_same_routes_show_it(app: Litestar, db: AsyncEngine) -> None:
    """Or the test above would try nothing."""
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        found = list(requests(app))
        others, messages = (by_shape(found, of_messages=each) for each in (False, True))
        for method, path, names in (*others, *messages):
            if path.startswith(SEALED) or path.endswith(SEALED_ENDS):
                continue
            if (method, path, names) == messages[0]:
                await give_batches_their_shape(db)
            if method == "GET" and names and {*names} <= {*IDS} - OTHERWISE:
                shown = 409 if path.endswith("/export") else 200  # her invoice is a draft
                async for answer in ask(client, ALICE, method, path):
                    assert answer.status_code == shown, f"{path}: {answer.text}"

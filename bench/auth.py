"""Measure what a request pays at the door: the guard, with a key or a token that the process knows.

    python -m bench.auth [--rounds N] [--dry]

The whole application is opened in this process on a Postgres and a Valkey of its own; what is timed
is `auth.guards.authenticate` alone, from the connection's raw headers to `scope["user"]`, on a
fresh connection each time. Side by side in one run, turn by turn: a route that is open to all (what
the measuring itself costs), an API key, one with every restriction there is behind a trusted proxy,
and an access token. The bounds are 15 microseconds for a key and 100 for a token, and no query may
reach Postgres while it is timed; a run that is recorded ends with 1 where one of these is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
import uvloop
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from bench.tools.record import record
from gateway.app.create import create_app
from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer import revocations
from gateway.auth.oauth.clients.metadata import ClientMetadata
from gateway.auth.oauth.clients.store import SECRET_PEPPER_PURPOSE, create_client
from gateway.db import tenant
from gateway.home import Home
from gateway.principal import SCOPE_INFERENCE
from gateway.processes import embedded_databases as embedded
from gateway.processes.credentials_file import Credentials
from gateway.processes.database import prepare
from gateway.routes.shared.access import PUBLIC, needs
from gateway.routes.shared.guards import authenticate
from gateway.routes.shared.services import Services
from gateway.secret import Peppers, Secret
from gateway.settings.load import Settings, load
from gateway.tenancy import changes
from gateway.tenancy.tables import api_keys

BATCH = 2000
"""Requests of one turn."""
BOUNDS_US = {"API key": 15.0, "API key, restricted": 15.0, "access token": 100.0}
BEHIND = ("last_used_at", "FROM revocations")
"""In queries that come now and then from tasks of the process, whatever is asked."""
FLOOR = "open route"
STALE_AFTER_S = 60.0
PROXY, CLIENT = "127.0.0.1", "203.0.113.9"
CONFIG = """
trusted_proxies = ["127.0.0.1"]

[[model]]
name = "stub"
upstream = "http://127.0.0.1:9/v1"
"""
# What a browser or an SDK sends besides: a guard looks through all of it.
USUAL_HEADERS = [
    (b"host", b"gateway.example"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"application/json"),
    (b"content-length", b"120"),
    (b"user-agent", b"OpenAI/Python 3.52.0"),
    *((b"x-stainless-%d" % number, b"value") for number in range(8)),
]

Headers = list[tuple[bytes, bytes]]


@asynccontextmanager
async def application(folder: Path) -> AsyncIterator[tuple[Litestar, Settings, Credentials]]:
    """On databases that die with it."""
    home = Home(folder)
    home.create()
    async with AsyncExitStack() as stack:
        for start in (embedded.start_postgres, embedded.start_redis):
            child = await start(home, durable=False)
            stack.push_async_callback(child.stop, embedded.STOP_TIMEOUT_S)
        config = folder / "tollgate.toml"
        config.write_text(CONFIG)
        urls = {
            "TOLLGATE_DATABASE_URL": embedded.postgres_url(home),
            "TOLLGATE_REDIS_URL": embedded.redis_url(home),
        }
        settings = load({"home": folder, "config": config}, urls)
        assert settings.database_url is not None and settings.redis_url is not None
        credentials = await prepare(
            settings, settings.database_url, settings.redis_url, "http://127.0.0.1/v1"
        )
        assert credentials is not None
        app = create_app(settings)
        app.register_late_routes()
        async with app.lifespan():
            yield app, settings, credentials


async def restricted_key(app: Litestar, admin_key: str, services: Services) -> str:
    async with services.system_db.connect() as conn:
        project_id = await conn.scalar(sa.select(api_keys.c.project_id).limit(1))
    body = {
        "name": "restricted",
        "project_id": project_id,
        "models": [f"model-{number}" for number in range(20)],
        "ip_ranges": [f"203.0.113.{4 * number}/31" for number in range(60)] + [CLIENT],
        "tokens_per_minute": 10**9,
        "expires_at": int(time.time()) + 86_400,
    }
    found = await post(app, "/v1/admin/keys", json=body, headers=bearer(admin_key))
    key: str = found["value"]
    return key


async def access_token(app: Litestar, settings: Settings, services: Services) -> str | None:
    """By client credentials; None where this gateway issues none."""
    metadata = ClientMetadata(
        client_name="bench",
        token_endpoint_auth_method="client_secret_post",
        grant_types=["client_credentials"],
        response_types=[],
    )
    peppers = Peppers(Secret.load(settings.secret_key_file), SECRET_PEPPER_PURPOSE)
    async with services.system_db.connect() as conn:
        row = (await conn.execute(sa.select(api_keys.c.org_id, api_keys.c.project_id))).first()
    assert row is not None
    async with tenant(services.system_db, row.org_id) as conn:
        made = await create_client(
            conn,
            peppers,
            metadata=metadata,
            scopes=[SCOPE_INFERENCE],
            actor=COMMAND_LINE,
            org_id=row.org_id,
            project_id=row.project_id,
        )
    form = {
        "grant_type": "client_credentials",
        "client_id": made.client.id,
        "client_secret": made.client_secret,
        "scope": SCOPE_INFERENCE,
    }
    if not any(route.path == "/oauth/token" for route in app.routes):
        return None
    found = await post(app, "/oauth/token", data=form)
    token: str = found["access_token"]
    return token


async def post(app: Litestar, path: str, **options: Any) -> Any:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        answer = await client.post(path, **options)
    if answer.is_error:
        raise SystemExit(f"{path}: {answer.status_code} {answer.text}")
    return answer.json()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def a_handler(opt: dict[str, Any]) -> BaseRouteHandler:
    handler: BaseRouteHandler = BaseRouteHandler("/", opt=opt)
    return handler


async def timed(
    app: Litestar, handler: BaseRouteHandler, headers: Headers, scopes: int = BATCH
) -> float:
    """Microseconds of one guard; connections are made before."""
    connections: list[ASGIConnection[Any, Any, Any, Any]] = []
    for _ in range(scopes):
        scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": headers,
            "client": (PROXY, 40_000),
            "litestar_app": app,
            "app": app,
            "state": {},
            "path_params": {},
        }
        connections.append(ASGIConnection(scope))
    started = time.perf_counter()
    for connection in connections:
        await authenticate(connection, handler)
    return (time.perf_counter() - started) / scopes * 1e6


async def measure(folder: Path, rounds: int) -> dict[str, Any]:
    # On a busy machine a turn may be kept waiting longer than what is known may be believed.
    for module in (changes, revocations):
        module.MAX_STALENESS_S = STALE_AFTER_S  # type: ignore[attr-defined]
    async with application(folder) as (app, settings, credentials):
        services: Services = app.state.services
        shown = {
            FLOOR: None,
            "API key": credentials.api_key,
            "API key, restricted": await restricted_key(app, credentials.admin_key, services),
            "access token": await access_token(app, settings, services),
        }
        sides: dict[str, tuple[BaseRouteHandler, Headers]] = {}
        for name, credential in shown.items():
            if credential is not None:
                said = [
                    (b"authorization", f"Bearer {credential}".encode()),
                    (b"x-forwarded-for", CLIENT.encode()),
                ]
                sides[name] = a_handler(needs(SCOPE_INFERENCE)), [*USUAL_HEADERS, *said]
            elif name == FLOOR:
                sides[name] = a_handler(PUBLIC), USUAL_HEADERS
        queries: list[str] = []

        def note(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
            queries.append(statement)

        for pool in (services.db, services.system_db):
            sa.event.listen(pool.sync_engine, "before_cursor_execute", note)
        for handler, headers in sides.values():
            await timed(app, handler, headers)
        await asyncio.sleep(0.5)
        times: dict[str, list[float]] = {name: [] for name in sides}
        asked = 0
        for _ in range(rounds):
            for name, (handler, headers) in sides.items():
                queries.clear()
                times[name].append(await timed(app, handler, headers))
                asked += len([each for each in queries if not any(b in each for b in BEHIND)])
        return {name: summary(found) for name, found in times.items()} | {"queries": asked}


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_us": round(statistics.median(ordered), 2),
        "best_us": round(ordered[0], 2),
        "worst_us": round(ordered[-1], 2),
    }


def show(result: dict[str, Any]) -> bool:
    """Side by side; False where a bound is broken."""
    good: bool = result["queries"] == 0
    key_us = result["API key"]["median_us"]
    print(f"{'':<22}{'median us':>10}{'best':>8}{'bound':>8}{'x API key':>11}")
    for name in (FLOOR, *BOUNDS_US):
        if name not in result:
            print(f"{name:<22}{'(this gateway has none)':>24}")
            continue
        row, bound = result[name], BOUNDS_US.get(name)
        within = "" if bound is None else f"{bound:.0f}"
        print(
            f"{name:<22}{row['median_us']:>10.2f}{row['best_us']:>8.2f}{within:>8}"
            f"{row['median_us'] / key_us:>11.2f}"
        )
        good = good and (bound is None or row["median_us"] <= bound)
    print(f"queries to Postgres while it was timed: {result['queries']}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    load_average = round(os.getloadavg()[0], 2)
    folder = Path(tempfile.mkdtemp(prefix="tga-", dir="/tmp"))
    try:
        result = uvloop.run(measure(folder, options.rounds))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = show(result)
    result = {"load_average_before": load_average, "requests_each": BATCH * options.rounds} | result
    print(json.dumps(result))
    if not options.dry:
        print(record("auth", result))
        sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

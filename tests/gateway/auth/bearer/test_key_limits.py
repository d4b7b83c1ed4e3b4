"""A key is narrowed from its columns to its principal and to the door."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from litestar import Litestar, Request, get
from litestar.config.app import AppConfig
from litestar.datastructures import State
from redis.asyncio import Redis
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import refuse
from gateway.auth.errors import ExpiredKey, InvalidKey, WrongNetwork
from gateway.http_errors.table import to_http_error
from gateway.networks import Networks, read_address
from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.routes.shared.access import needs
from gateway.routes.shared.guards import authenticate, read_authorization
from gateway.tenancy.keys.keys import hash_key
from gateway.tenancy.tables import api_keys, plans, projects
from tests.databases import counted_queries
from tests.gateway.auth.bearer.test_api_keys import (
    PEPPER,
    PEPPER_ID,
    authenticating,
    make_key,
)

PEER = "10.0.0.1"
"""The address that the connection comes from: a proxy's."""


async def write(db: AsyncEngine, table: sa.Table, **columns: Any) -> None:
    async with db.begin() as conn:
        await conn.execute(sa.update(table).values(**columns))


async def principal_of(db: AsyncEngine, redis: Redis, secret: str) -> Principal:
    async with authenticating(db, redis) as authenticator:
        return await authenticator.authenticate(secret)


async def test_own_limits_and_those_of_the_plan_bind_together(
    db: AsyncEngine, redis: Redis
) -> None:
    created = await make_key(db)
    await write(db, api_keys, requests_per_minute=7)
    alone = (await principal_of(db, redis, created.secret)).key_plan
    assert (alone.name, alone.requests_per_minute, alone.tokens_per_minute) == ("own", 7, None)
    await write(db, plans, lane="agentic", input_tokens_per_minute=99)
    await write(db, api_keys, plan="small", tokens_per_minute=601)
    both = (await principal_of(db, redis, created.secret)).key_plan
    assert (both.name, both.tokens_per_minute, both.requests_per_minute) == ("small", 600, 7)
    assert (both.lane, both.input_tokens_per_minute) == ("agentic", 99), "the plan's other terms"
    await write(db, api_keys, tokens_per_minute=0)
    assert (await principal_of(db, redis, created.secret)).key_plan.tokens_per_minute == 0


@pytest.mark.parametrize(
    ("own", "mode", "of_project", "good", "bad"),
    [
        (None, None, None, "abc", ""),
        (["a", "b"], None, None, "ab", "c"),
        (None, "allow_list", ["b", "c"], "bc", "a"),
        (["a", "b"], "allow_list", ["b", "c"], "b", "ac"),
        (["a"], "allow_list", [], "", "abc"),
        (None, "deny_list", ["b"], "ac", "b"),
        (["a", "b"], "deny_list", ["b"], "a", "bc"),
    ],
)
async def test_a_model_must_be_allowed_to_the_key_and_to_its_project(
    db: AsyncEngine,
    redis: Redis,
    own: list[str] | None,
    mode: str | None,
    of_project: list[str] | None,
    good: str,
    bad: str,
) -> None:
    created = await make_key(db)
    await write(db, api_keys, models=own)
    await write(db, projects, models_mode=mode, models=of_project)
    principal = await principal_of(db, redis, created.secret)
    assert "".join(model for model in "abc" if principal.may_use(model)) == good
    assert not any(principal.may_use(model) for model in bad)


@pytest.mark.parametrize(
    "columns",
    [
        {"models": []},
        {"ip_ranges": []},
        {"tokens_per_minute": -1},
        {"model_limits": {}},
        {"model_limits": []},
        {"previous_hash": "x"},
        {"previous_hint": "x", "previous_expires_at": datetime.now(tz=UTC)},
    ],
)
async def test_the_table_refuses_half_a_restriction(
    db: AsyncEngine, columns: dict[str, Any]
) -> None:
    await make_key(db)
    with pytest.raises(IntegrityError):
        await write(db, api_keys, **columns)


async def test_a_secret_that_was_rotated_away_is_good_until_its_grace_is_over(
    db: AsyncEngine, redis: Redis
) -> None:
    created = await make_key(db)
    fresh = "sk-tg-" + "n" * 43
    until = datetime.now(tz=UTC) + timedelta(hours=1)
    await write(
        db,
        api_keys,
        key_hash=hash_key(PEPPER, fresh),
        last_four="nnnn",
        previous_hash=hash_key(PEPPER, created.secret),
        previous_pepper_id=PEPPER_ID,
        previous_hint=created.row.hint,
        previous_expires_at=until,
    )
    now = [until.timestamp() - 1]
    async with authenticating(db, redis, wall_clock=lambda: now[0]) as authenticator:
        new = await authenticator.authenticate(fresh)
        old = await authenticator.authenticate(created.secret)
        assert old.key_id == new.key_id == created.row.id
        assert (new.key_hint, old.key_hint) == ("sk-tg-...nnnn", created.row.hint)
        assert new.expires_at is None
        now[0] += 2
        assert await authenticator.authenticate(fresh) == new
        with pytest.raises(ExpiredKey):
            await authenticator.authenticate(created.secret)
    await write(db, api_keys, expires_at=until - timedelta(minutes=1))
    now[0] = until.timestamp() - 120
    async with authenticating(db, redis, wall_clock=lambda: now[0]) as authenticator:
        for secret in (fresh, created.secret):
            assert (await authenticator.authenticate(secret)).expires_at == pytest.approx(
                (until - timedelta(minutes=1)).timestamp(), abs=1e-5
            )


@get("/where", opt=needs(SCOPE_INFERENCE))
async def where(request: Request[Principal, Any, Any]) -> str:
    return request.user.key_id


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-forwarded-for": "203.0.113.9"}, 200),
        ({"forwarded": "for=203.0.113.9"}, 200),
        ({"x-forwarded-for": "203.0.113.9, 198.51.100.1"}, 401),
        ({"x-forwarded-for": "198.51.100.1", "forwarded": "for=203.0.113.9"}, 401),
        ({"x-forwarded-for": "nonsense"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_is_good_where_it_may_be_used_from(
    db: AsyncEngine, redis: Redis, headers: dict[str, str], status: int
) -> None:
    created = await make_key(db)
    await write(db, api_keys, ip_ranges=["203.0.113.0/24", "2001:db8::/32"])
    async with authenticating(db, redis) as authenticator:
        found = SimpleNamespace(authenticator=authenticator, trusted_proxies=Networks.of([PEER]))

        def wire(config: AppConfig) -> AppConfig:
            config.state = State({"services": found, "public_url": "http://t"})
            return config

        app = Litestar(
            [where],
            guards=[authenticate],
            exception_handlers={Exception: refuse},
            on_app_init=[wire],
            openapi_config=None,
        )
        bearer = {"authorization": f"Bearer {created.secret}"}
        for peer, expected in ((PEER, status), ("198.51.100.1", 401), ("203.0.113.200", 200)):
            transport = httpx.ASGITransport(app=app, client=(peer, 1))  # type: ignore[arg-type]
            async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
                answer = await client.get("/where", headers=bearer | headers)
            assert answer.status_code == expected, peer
            if expected == 401:
                assert answer.json()["error"]["code"] == "ip_not_authorized"
                assert created.secret not in answer.text


async def test_a_connection_without_an_address_is_in_no_network() -> None:
    principal = Principal(
        org_id="o",
        project_id="p",
        key_id="k",
        key_hint="",
        scopes=frozenset({SCOPE_INFERENCE}),
        allowed_networks=Networks.of(["0.0.0.0/0", "::/0"]),
    )
    assert read_address("::1") in Networks.of(["::/0"])

    class Always:
        async def authenticate(self, bearer: str) -> Principal:
            return principal

    found = SimpleNamespace(authenticator=Always(), trusted_proxies=Networks())
    headers = [(b"authorization", b"Bearer x")]
    scope: dict[str, Any] = {"method": "GET", "headers": headers, "client": None}
    scope["litestar_app"] = SimpleNamespace(state={"services": found})
    connection: Any = SimpleNamespace(scope=scope)
    handler: Any = SimpleNamespace(opt=needs(SCOPE_INFERENCE))
    with pytest.raises(WrongNetwork) as refused:
        await authenticate(connection, handler)
    assert to_http_error(refused.value).status == 401
    scope["client"] = (PEER, 1)
    await authenticate(connection, handler)
    assert scope["user"] is principal


def test_two_authorizations_are_none() -> None:
    assert read_authorization([(b"host", b"t"), (b"authorization", b"Bearer a")]) == "Bearer a"
    assert read_authorization([]) == ""
    with pytest.raises(InvalidKey):
        read_authorization([(b"authorization", b"Bearer a"), (b"authorization", b"Bearer b")])


async def test_no_query_stands_in_the_way_of_a_known_key(db: AsyncEngine, redis: Redis) -> None:
    """The whole door, with every restriction there is."""
    created = await make_key(db)
    await write(db, api_keys, ip_ranges=["203.0.113.0/24"], models=["a"], tokens_per_minute=9)
    await write(db, api_keys, model_limits={"a": {"tokens_per_minute": 9}})
    async with authenticating(db, redis) as authenticator:
        found = SimpleNamespace(authenticator=authenticator, trusted_proxies=Networks.of([PEER]))
        headers = [
            (b"authorization", f"Bearer {created.secret}".encode()),
            (b"x-forwarded-for", b"203.0.113.9"),
        ]
        scope = {"method": "POST", "headers": headers, "client": (PEER, 1)}
        app = SimpleNamespace(state={"services": found})
        connection: Any = SimpleNamespace(scope=scope | {"litestar_app": app})
        handler: Any = SimpleNamespace(opt=needs(SCOPE_INFERENCE))
        await authenticate(connection, handler)
        with counted_queries(db) as queries:
            for _ in range(1000):
                await authenticate(connection, handler)
        assert queries == []

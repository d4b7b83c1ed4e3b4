"""Credentials of upstreams: sealed, bound to their rows, and nobody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.vault import credentials as vault_credentials
from gateway.vault.credentials import (
    OpenCredential,
    UpstreamCredential,
    credentials,
    delete_credential,
    find_credential,
    mark_refused,
    open_credential,
    put_credential,
    rewrap_credentials,
)
from gateway.vault.envelope import Unreadable, Vault
from gateway.vault.errors import CannotOpen
from tests.gateway.a_secret import a_secret
from tests.gateway.vault.conftest import Tenant, Tenants

VAULT = Vault(a_secret("one"))
TOKEN = "ghp-canary-0123456789"
VALUES = {"GITHUB_TOKEN": TOKEN}


async def put(
    tenant_db: AsyncEngine,
    whose: Tenant,
    values: Mapping[str, str] = VALUES,
    *,
    user_id: str | None = None,
    upstream: str = "github",
    vault: Vault = VAULT,
) -> UpstreamCredential:
    async with tenant(tenant_db, whose.org_id) as conn:
        return await put_credential(
            conn,
            vault,
            org_id=whose.org_id,
            upstream=upstream,
            user_id=user_id,
            values=values,
            actor=COMMAND_LINE,
        )


async def opened(
    tenant_db: AsyncEngine, whose: Tenant, user_id: str | None = None, vault: Vault = VAULT
) -> OpenCredential | None:
    async with tenant(tenant_db, whose.org_id) as conn:
        return await open_credential(
            conn, vault, org_id=whose.org_id, upstream="github", user_id=user_id
        )


async def values_of(tenant_db: AsyncEngine, whose: Tenant, user_id: str | None = None) -> Any:
    found = await opened(tenant_db, whose, user_id)
    return None if found is None else dict(found.values)


async def test_a_users_own_stands_before_the_tenants_and_nobody_elses(
    tenant_db: AsyncEngine, tenants: Tenants
) -> None:
    alice, mallory = tenants.alice, tenants.mallory
    assert await values_of(tenant_db, alice) is None
    await put(tenant_db, alice, {"T": "shared"})
    await put(tenant_db, alice, {"T": "mine"}, user_id=alice.user_id)
    assert await values_of(tenant_db, alice) == {"T": "shared"}
    assert await values_of(tenant_db, alice, alice.user_id) == {"T": "mine"}
    assert await values_of(tenant_db, alice, alice.colleague_id) == {"T": "shared"}
    for user_id in (None, alice.user_id, mallory.user_id):
        assert await values_of(tenant_db, mallory, user_id) is None
    async with tenant(tenant_db, alice.org_id) as conn:
        found = await find_credential(
            conn, org_id=alice.org_id, upstream="github", user_id=alice.user_id
        )
        assert found is not None and found.user_id == alice.user_id
        rows = await conn.execute(sa.select(credentials.c.user_id))
        assert {row.user_id for row in rows} == {None, alice.user_id}


async def test_other_values_are_another_credential_set(
    tenant_db: AsyncEngine, tenants: Tenants
) -> None:
    first = await put(tenant_db, tenants.alice)
    second = await put(tenant_db, tenants.alice, {"OTHER": "x"})
    assert (second.id, second.version, second.names) == (first.id, 2, ["OTHER"])
    assert first.credential_set != second.credential_set
    assert await values_of(tenant_db, tenants.alice) == {"OTHER": "x"}


async def test_what_is_stored_and_said_of_it_holds_no_value(
    db: AsyncEngine, tenant_db: AsyncEngine, tenants: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    made = await put(tenant_db, tenants.alice)
    found = await opened(tenant_db, tenants.alice)
    assert found is not None and found.values == VALUES
    async with tenant(tenant_db, tenants.alice.org_id) as conn:
        await delete_credential(conn, org_id=made.org_id, credential_id=made.id, actor=COMMAND_LINE)
    async with db.connect() as conn:
        log = list(await conn.scalars(sa.text("SELECT e::text FROM audit_entries e")))
    assert sum("upstream_credential." in entry for entry in log) == 2
    for text in (*log, repr(made), repr(found), caplog.text):
        assert TOKEN not in text
    assert await values_of(tenant_db, tenants.alice) is None
    with pytest.raises(NotFound):
        async with tenant(tenant_db, tenants.alice.org_id) as conn:
            await delete_credential(
                conn, org_id=made.org_id, credential_id=made.id, actor=COMMAND_LINE
            )


@pytest.mark.parametrize("column", ["sealed", "wrapped_key"])
async def test_what_was_tampered_with_or_moved_does_not_open(
    db: AsyncEngine, tenant_db: AsyncEngine, tenants: Tenants, column: str
) -> None:
    """Nobody who can write to Postgres makes a tenant show another one's credential, or an old
    one."""
    await put(tenant_db, tenants.alice, {"T": "hers"})
    theirs = await put(tenant_db, tenants.mallory, {"T": "theirs"})
    copied = f"""
        UPDATE upstream_credentials AS to_
        SET sealed = from_.sealed, wrapped_key = from_.wrapped_key
        FROM upstream_credentials AS from_ WHERE to_.id = '{theirs.id}' AND from_.id <> to_.id
    """
    older = f"UPDATE upstream_credentials SET version = version + 1 WHERE id = '{theirs.id}'"
    flipped = f"""
        UPDATE upstream_credentials
        SET {column} = set_byte({column}, 20, 255 - get_byte({column}, 20))
        WHERE id = '{theirs.id}'
    """
    short = f"UPDATE upstream_credentials SET {column} = '' WHERE id = '{theirs.id}'"
    for statement in (copied, older, flipped, short):
        await put(tenant_db, tenants.mallory, {"T": "theirs"})
        assert await values_of(tenant_db, tenants.mallory) == {"T": "theirs"}
        async with db.begin() as conn:
            await conn.execute(sa.text(statement))
        with pytest.raises(CannotOpen, match="github: its credential cannot be read"):
            await opened(tenant_db, tenants.mallory)


async def test_another_secret_wraps_the_keys_anew_and_touches_no_value(
    db: AsyncEngine, tenant_db: AsyncEngine, system_db: AsyncEngine, tenants: Tenants
) -> None:
    """All of them, whoever's, by two workers at once; then the old secret can go."""
    for number in range(5):
        for whose in (tenants.alice, tenants.mallory):
            await put(tenant_db, whose, {"T": f"{number}"}, upstream=f"u{number}")
    await put(tenant_db, tenants.alice, {"T": "x"}, upstream="lost", vault=Vault(a_secret("gone")))
    sealed = sa.text("SELECT id, sealed FROM upstream_credentials ORDER BY id")
    async with db.connect() as conn:
        before = (await conn.execute(sealed)).all()
    rotated = Vault(a_secret("two", "one"))

    async def walk() -> int:
        done, after = 0, ""
        while True:
            async with system_db.begin() as conn:
                found = await rewrap_credentials(conn, rotated, after=after, most=3)
            done += found.done
            if found.last is None:
                return done
            after = found.last

    assert sum(await asyncio.gather(walk(), walk())) + await walk() == 10
    async with db.connect() as conn:
        assert (await conn.execute(sealed)).all() == before
        ids = list(await conn.scalars(sa.text("SELECT secret_id FROM upstream_credentials")))
    assert sorted(ids) == ["gone", *["two"] * 10]
    alone = Vault(a_secret("two"))
    for number in range(5):
        async with tenant(tenant_db, tenants.alice.org_id) as conn:
            found = await open_credential(
                conn, alone, org_id=tenants.alice.org_id, upstream=f"u{number}", user_id=None
            )
        assert found is not None and found.values == {"T": f"{number}"}


async def test_of_two_at_once_one_is_told(tenant_db: AsyncEngine, tenants: Tenants) -> None:
    async def attempt(value: str) -> str:
        try:
            await put(tenant_db, tenants.alice, {"T": value})
        except NameTaken:
            return "told"
        return "put"

    outcomes = await asyncio.gather(*(attempt(f"{n}") for n in range(6)))
    assert "put" in outcomes
    async with tenant(tenant_db, tenants.alice.org_id) as conn:
        rows = (await conn.execute(sa.select(credentials.c.version))).all()
    assert len(rows) == 1
    assert rows[0].version == outcomes.count("put")


async def test_refused_is_said_of_the_values_that_were_refused(
    tenant_db: AsyncEngine, tenants: Tenants
) -> None:
    made = await put(tenant_db, tenants.alice)
    for version, expected in ((made.version + 1, False), (made.version, True)):
        async with tenant(tenant_db, made.org_id) as conn:
            assert expected is await mark_refused(
                conn, org_id=made.org_id, credential_id=made.id, version=version
            )
    found = await opened(tenant_db, tenants.alice)
    assert found is not None and found.credential.refused_at is not None
    assert (await put(tenant_db, tenants.alice)).refused_at is None


@pytest.mark.parametrize(
    ("upstream", "values", "field"),
    [
        ("", VALUES, "upstream"),
        ("a/b", VALUES, "upstream"),
        ("x" * 129, VALUES, "upstream"),
        ("x", {}, "values"),
        ("x", {f"N{n}": "v" for n in range(17)}, "values"),
        ("x", {"A B": "secret-v"}, "values"),
        ("x", {"A": ""}, "values"),
        ("x", {"A": "secret-v" * 3000}, "values"),
        ("x", {"A": "secret-v\r\nX: y"}, "values"),
    ],
)
async def test_what_cannot_be_kept_names_its_field_and_says_no_value(
    tenant_db: AsyncEngine, tenants: Tenants, upstream: str, values: dict[str, str], field: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        await put(tenant_db, tenants.alice, values, upstream=upstream)
    assert refused.value.param == field
    assert "secret-v" not in str(refused.value)


async def test_an_organization_keeps_so_many(
    tenant_db: AsyncEngine, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault_credentials, "MAX_PER_ORG", 2)
    await put(tenant_db, tenants.alice, upstream="a")
    await put(tenant_db, tenants.alice, upstream="b")
    with pytest.raises(InvalidField, match="at most 2 credentials"):
        await put(tenant_db, tenants.alice, upstream="c")
    await put(tenant_db, tenants.alice, {"T": "again"}, upstream="a")
    await put(tenant_db, tenants.mallory, upstream="c")


@given(st.binary(max_size=200), st.binary(max_size=40), st.binary(max_size=40))
def test_an_envelope_opens_where_it_was_sealed(plain: bytes, context: bytes, other: bytes) -> None:
    envelope = VAULT.seal(plain, context)
    assert VAULT.open(envelope, context) == plain
    rotated = Vault(a_secret("two", "one"))
    fresh = rotated.rewrap(envelope, context)
    assert (fresh.secret_id, fresh.sealed) == ("two", envelope.sealed)
    assert Vault(a_secret("two")).open(fresh, context) == plain
    with pytest.raises(Unreadable):
        VAULT.open(fresh, context)
    if other != context:
        with pytest.raises(Unreadable):
            VAULT.open(envelope, other)
    assert plain not in envelope.sealed or len(plain) < 4

"""Keys that sign: one at a time, known before they sign, good for what they signed, and never to be
read in Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from joserfc import jwt
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.signing_keys import (
    JWKS_MAX_AGE_S,
    PURPOSE,
    ROTATE_AFTER_S,
    VERIFY_FOR_S,
    KeyRing,
    SigningKeyRow,
    TooSoon,
    ensure_keys,
    public_columns,
    read_ring,
    revoke,
    rotate,
)
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.secret import Cipher, UnknownSecret
from gateway.tenancy.errors import NotFound
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.parts import NOW, Clock

START = datetime.fromtimestamp(NOW, UTC)
CIPHER = Cipher(a_secret("new", "old"), PURPOSE)


@pytest.fixture
async def system_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url, role=ROLE_SYSTEM, pool_size=20)
    yield engine
    await engine.dispose()


async def list_keys(conn: AsyncConnection) -> list[SigningKeyRow]:
    """Newest first."""
    listed = sa.select(*public_columns()).order_by(sa.text("kid DESC"))
    return [SigningKeyRow(**row._mapping) for row in await conn.execute(listed)]


async def test_of_many_that_start_at_once_one_makes_the_keys(system_db: AsyncEngine) -> None:
    rings = [KeyRing(system_db, CIPHER, clock=Clock()) for _ in range(8)]
    await asyncio.gather(*(ring.start() for ring in rings))
    assert len({ring.ring.active.kid for ring in rings}) == 1
    for ring in rings:
        assert len(ring.ring.verifying) == 2, "one that signs, one that is only published"
        await ring.close()


async def test_a_rotation_overlaps_on_both_sides(system_db: AsyncEngine) -> None:
    clock = Clock()
    ring = KeyRing(system_db, CIPHER, clock=clock)
    await ring.start()
    first = ring.ring.active.kid
    ahead = next(kid for kid in ring.ring.verifying if kid != first)
    async with system_db.begin() as conn:
        with pytest.raises(TooSoon) as too_soon:
            await rotate(conn, CIPHER, ring.now())
    assert too_soon.value.retry_after_s == JWKS_MAX_AGE_S
    clock.now += JWKS_MAX_AGE_S
    async with system_db.begin() as conn:
        row = await rotate(conn, CIPHER, ring.now())
    assert row is not None and row.kid == ahead and row.state == "active"
    await ring.reload()
    assert ring.ring.active.kid == ahead
    assert len(ring.ring.verifying) == 3 and first in ring.ring.verifying
    assert set(ring.ring.signing) == {first, ahead}
    clock.now += VERIFY_FOR_S
    await ring.reload()
    assert first not in ring.ring.verifying
    await ring.close()


async def test_concurrent_rotations_are_one(system_db: AsyncEngine) -> None:
    async with system_db.begin() as conn:
        await ensure_keys(conn, CIPHER, START)
    later = START + timedelta(seconds=JWKS_MAX_AGE_S)

    async def try_to() -> bool:
        async with system_db.begin() as conn:
            return await rotate(conn, CIPHER, later) is not None

    done = await asyncio.gather(*(try_to() for _ in range(5)), return_exceptions=True)
    assert sorted(str(type(each).__name__) for each in done) == ["TooSoon"] * 4 + ["bool"]


async def test_a_key_that_is_old_is_rotated_by_itself(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signing_keys, "RELOAD_S", 0.02)
    clock = Clock()
    ring = KeyRing(system_db, CIPHER, clock=clock)
    await ring.start()
    first = ring.ring.active.kid
    await asyncio.sleep(0.1)
    assert ring.ring.active.kid == first
    clock.now += ROTATE_AFTER_S + 1
    async with asyncio.timeout(30):
        while ring.ring.active.kid == first:
            await asyncio.sleep(0.01)
    await ring.close()


async def test_a_due_key_waits_for_its_successor(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signing_keys, "RELOAD_S", 0.02)
    monkeypatch.setattr(signing_keys, "ROTATE_AFTER_S", -1.0)
    caplog.set_level("INFO")
    ring = KeyRing(system_db, CIPHER, clock=Clock())
    await ring.start()
    async with asyncio.timeout(30):
        while "published for long enough" not in caplog.text:
            await asyncio.sleep(0.01)
    await ring.close()


async def test_a_revoked_key_verifies_nothing_and_is_replaced(system_db: AsyncEngine) -> None:
    clock = Clock()
    ring = KeyRing(system_db, CIPHER, clock=clock)
    await ring.start()
    bad = ring.ring.active.kid
    assert bad is not None
    for _ in range(2):
        async with system_db.begin() as conn:
            row = await revoke(conn, CIPHER, bad, ring.now())
        assert row.state == "retired" and row.verify_until == ring.now()
    await ring.reload()
    assert bad not in ring.ring.verifying and ring.ring.active.kid != bad
    async with system_db.begin() as conn:
        assert await conn.scalar(
            sa.text("SELECT private_key IS NULL FROM signing_keys WHERE kid = :kid"), {"kid": bad}
        )
        with pytest.raises(NotFound):
            await revoke(conn, CIPHER, "nobody", ring.now())
    await ring.close()


async def test_a_retired_key_and_the_next_one_can_be_revoked(system_db: AsyncEngine) -> None:
    async with system_db.begin() as conn:
        await ensure_keys(conn, CIPHER, START)
        first = (await read_ring(conn, CIPHER, START)).active.kid
        now = START + timedelta(seconds=JWKS_MAX_AGE_S)
        await rotate(conn, CIPHER, now)
        assert first is not None
        retired = await revoke(conn, CIPHER, first, now)
        assert retired.retired_at == retired.verify_until == now
        ahead = next(row for row in await list_keys(conn) if row.state == "next")
        await revoke(conn, CIPHER, ahead.kid, now)
        rows = await list_keys(conn)
        assert [row.state for row in rows].count("next") == 1


async def test_the_private_key_is_sealed_to_its_row(system_db: AsyncEngine) -> None:
    async with system_db.begin() as conn:
        await ensure_keys(conn, CIPHER, START)
        rows = (await conn.execute(sa.text("SELECT * FROM signing_keys"))).all()
        for row in rows:
            plain = CIPHER.open(bytes(row.private_key), row.kid.encode(), row.secret_id)
            assert plain not in bytes(row.private_key)
            assert "d" not in row.public_jwk
            with pytest.raises(InvalidTag):
                CIPHER.open(bytes(row.private_key), b"another row", row.secret_id)
            with pytest.raises(UnknownSecret):
                Cipher(a_secret("third"), PURPOSE).open(b"", b"", row.secret_id)
            assert CIPHER.knows(row.secret_id)
            assert not Cipher(a_secret("third"), PURPOSE).knows(row.secret_id)


async def test_keys_under_an_older_secret_stay_good(system_db: AsyncEngine) -> None:
    async with system_db.begin() as conn:
        await ensure_keys(conn, Cipher(a_secret("old"), PURPOSE), START)
        assert len((await read_ring(conn, CIPHER, START)).signing) == 1
        with pytest.raises(AuthUnavailable):
            await read_ring(conn, Cipher(a_secret("third"), PURPOSE), START)


async def test_the_key_set_holds_no_private_part(system_db: AsyncEngine) -> None:
    ring = KeyRing(system_db, CIPHER, clock=Clock())
    await ring.start()
    keys = ring.ring.jwks()["keys"]
    assert len(keys) == 2
    for key in keys:
        assert set(key) == {"kty", "n", "e", "kid", "use", "alg"}
    token = jwt.encode({"alg": "RS256"}, {"a": 1}, ring.ring.active, algorithms=["RS256"])
    public = ring.ring.verifying[ring.ring.active.kid or ""]
    assert jwt.decode(token, public, algorithms=["RS256"]).claims == {"a": 1}
    await ring.close()


async def test_unknown_key_ids_cause_a_bounded_number_of_reads(system_db: AsyncEngine) -> None:
    clock, monotonic = Clock(), Clock()
    ring = KeyRing(system_db, CIPHER, clock=clock, monotonic=monotonic)
    await ring.start()
    reads: list[str] = []
    sa.event.listen(
        system_db.sync_engine, "before_cursor_execute", lambda *args: reads.append(args[2])
    )
    assert await ring.verifier("nobody") is None
    assert reads == []
    monotonic.now += signing_keys.MIN_RELOAD_INTERVAL_S
    assert await asyncio.gather(*(ring.verifier(f"nobody-{n}") for n in range(50))) == [None] * 50
    assert len(reads) == 1
    clock.now += JWKS_MAX_AGE_S
    async with system_db.begin() as conn:
        assert await rotate(conn, CIPHER, ring.now()) is not None
        await ensure_keys(conn, CIPHER, ring.now())
    other = KeyRing(system_db, CIPHER, clock=clock)
    await other.reload()
    fresh = next(kid for kid in other.ring.verifying if kid not in ring.ring.verifying)
    monotonic.now += signing_keys.MIN_RELOAD_INTERVAL_S
    assert await ring.verifier(fresh) is not None, "another process's rotation"
    await ring.close()


async def test_without_postgres_it_starts_and_goes_on_trying(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signing_keys, "RETRY_S", 0.01)
    nowhere = create_engine("postgresql+asyncpg://nobody@/none?host=/nonexistent")
    ring = KeyRing(nowhere, CIPHER, clock=Clock())
    await ring.start()
    with pytest.raises(AuthUnavailable):
        _ = ring.ring
    ring._read_at = -1e9
    with pytest.raises(AuthUnavailable):
        await ring.verifier("any")
    assert await ring.verifier("any") is None
    await asyncio.sleep(0.05)
    ring._db = system_db
    async with asyncio.timeout(30):
        while ring._ring is None:
            await asyncio.sleep(0.01)
    assert caplog.text.count("cannot be read") == 1
    monkeypatch.setattr(signing_keys, "RELOAD_S", 0.01)
    await ring.close()
    await ring.close()
    await nowhere.dispose()


async def test_an_outage_is_logged_once(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signing_keys, "RETRY_S", 0.01)
    monkeypatch.setattr(signing_keys, "RELOAD_S", 0.01)
    ring = KeyRing(system_db, CIPHER, clock=Clock())
    await ring.start()
    known = ring.ring
    nowhere = create_engine("postgresql+asyncpg://nobody@/none?host=/nonexistent")
    ring._db = nowhere
    async with asyncio.timeout(30):
        while "cannot be read" not in caplog.text:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert caplog.text.count("cannot be read") == 1
    assert ring.ring is known, "what was known goes on verifying"
    await ring.close()
    await nowhere.dispose()

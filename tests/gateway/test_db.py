"""The pool towards a Postgres that does not answer."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

import gateway.db
from gateway.db import create_engine


async def test_a_server_that_falls_silent_is_given_up_on(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.db.COMMAND_TIMEOUT_S > gateway.db.STATEMENT_TIMEOUT_S
    monkeypatch.setattr(gateway.db, "COMMAND_TIMEOUT_S", 0.5)
    engine = create_engine(postgres_url)
    start_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with engine.connect() as connection:
            await connection.execute(text("SELECT pg_sleep(20)"))
    assert time.monotonic() - start_s < 10
    async with engine.connect() as connection:
        assert await connection.scalar(text("SELECT 1")) == 1
    await engine.dispose()


async def test_what_went_wrong_says_nothing_of_what_was_asked(postgres_url: str) -> None:
    engine = create_engine(postgres_url)
    with pytest.raises(DBAPIError) as failed:
        async with engine.connect() as conn:
            wanted = text("SELECT 1 / length(CAST(:given AS text)) - 1 / (length('') * 0)")
            await conn.execute(wanted, {"given": "what-a-row-holds"})
    await engine.dispose()
    assert "SELECT 1" in str(failed.value) and "what-a-row-holds" not in str(failed.value)

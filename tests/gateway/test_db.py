"""The pool towards a Postgres that does not answer."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

import gateway.db
from gateway.db import create_engine


async def test_a_server_that_falls_silent_is_given_up_on(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gateway.db.COMMAND_TIMEOUT_S > gateway.db.STATEMENT_TIMEOUT_S
    monkeypatch.setattr(gateway.db, "COMMAND_TIMEOUT_S", 0.5)
    engine = create_engine(postgres_url)
    with pytest.raises(TimeoutError):
        async with engine.connect() as connection:
            await connection.execute(text("SELECT pg_sleep(20)"))
    assert await first_answer(engine) == 1
    await engine.dispose()


async def first_answer(engine: AsyncEngine) -> int:
    """Ask until it answers: where the machine is busy, that takes longer than a command may."""
    async with asyncio.timeout(60):
        while True:
            with suppress(TimeoutError):
                async with engine.connect() as connection:
                    return int(await connection.scalar(text("SELECT 1")))


async def test_what_went_wrong_says_nothing_of_what_was_asked(postgres_url: str) -> None:
    engine = create_engine(postgres_url)
    with pytest.raises(DBAPIError) as failed:
        async with engine.connect() as conn:
            wanted = text("SELECT 1 / length(CAST(:given AS text)) - 1 / (length('') * 0)")
            await conn.execute(wanted, {"given": "what-a-row-holds"})
    await engine.dispose()
    assert "SELECT 1" in str(failed.value) and "what-a-row-holds" not in str(failed.value)

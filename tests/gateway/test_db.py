"""The pool towards a Postgres that does not answer."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import text

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

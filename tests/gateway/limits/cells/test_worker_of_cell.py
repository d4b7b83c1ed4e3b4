"""A worker with `[cell]` lets requests pass by its cell's part, and tells Postgres of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from gateway.settings.file import SettingsError
from gateway.settings.load import load
from tests.budget import NIGHT
from tests.databases import Databases
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import TIMEOUT_S, Running


async def cells_of(worker: Running) -> list[str]:
    async with worker.services.system_db.connect() as conn:
        return list(await conn.scalars(sa.text("SELECT cell FROM cell_demands")))


@NIGHT
def test_it_has_all_of_a_limit_where_there_is_no_other_cell(
    databases: Databases, redis_server_url: str, tmp_path: Path
) -> None:
    cell = '[cell]\nname = "eu-1"\n'
    with fresh_worker(databases, redis_server_url, tmp_path, more=cell) as worker:
        assert worker.run(cells_of(worker)) == ["eu-1"]
        answer = worker.session.post(
            f"{worker.url}/v1/chat/completions",
            json={"model": "far", "messages": [{"role": "user", "content": "hi"}]},
            headers={"authorization": f"Bearer {worker.everything}"},
            timeout=TIMEOUT_S,
        )
        assert answer.status_code == 200


def test_a_name_is_checked(tmp_path: Path) -> None:
    config = tmp_path / "tollgate.toml"
    config.write_text('[cell]\nname = "EU 1"\n')
    with pytest.raises(SettingsError, match="cell.name: .*1 to 32 of a-z"):
        load({"home": tmp_path, "config": config}, {})

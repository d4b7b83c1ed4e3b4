"""A backup while usage flows and gateways die, killed in the middle and begun again; its restore,
killed in the middle and begun again: every answer is in the books once, and they balance."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.budget import cycles
from tests.chaos.metered import GATEWAYS, Site
from tests.chaos.metering import Arena, judge
from tests.databases import with_cluster
from tests.gateway.backup.doomed import run_doomed
from tests.gateway.backup.test_restored import folder, run

__all__ = ["folder"]
pytestmark = pytest.mark.slow

KILLS = cycles(20, daily=2)
"""Kills of `create`, and as many of `restore`."""
LAST_WRITE = 24
"""`create` has more steps than these."""
LAST_STEP = 240
"""`restore` has more than these; the later ones build indexes and constraints."""


def journals(site: Site, verb: str) -> dict[str, list[str]]:
    """The lines of each gateway's clients that begin with `verb`."""
    return {
        name: [
            line for line in site.journal(name).read_text().splitlines() if line.startswith(verb)
        ]
        for name in GATEWAYS
    }


async def test_kills_of_backup_and_restore_lose_and_double_nothing(
    folder: Path, redis_url: str
) -> None:
    rng = random.Random(19)
    site, restored = (
        Site(home=Home(folder / name), saves_early=False) for name in ("home", "other")
    )
    with_cluster(site.home)
    site.home.create()
    site.pass_days(1)
    archive, key = str(folder / "archive"), str(folder / "backup.key")
    arena = Arena(site, rng)
    await arena.start()
    try:
        environ = {
            "TOLLGATE_HOME": str(site.home.root),
            "TOLLGATE_DATABASE_URL": site.database_url,
            "TOLLGATE_REDIS_URL": redis_url,
            "TOLLGATE_CONFIG": "",
        }
        create = ("backup", "create", "--to", run({}, "backup", "key", key).strip(), archive)
        run(environ, "migrate")
        killed = 0
        while killed < KILLS:
            await arena.kill(rng.choice(GATEWAYS))  # its spool is adopted meanwhile
            await arena.progress()
            killed += run_doomed(rng.randrange(1, LAST_WRITE), *create, **environ)
        await arena.progress()
        answered = journals(site, "answered")
        run(environ, *create)
        asked = journals(site, "asked")
        days = site.calendar.read_bytes()
    finally:
        await arena.clean_up()
    assert "whole" in run({}, "backup", "verify", "--identity", key, archive)

    into = {
        "TOLLGATE_HOME": str(restored.home.root),
        "TOLLGATE_REDIS_URL": redis_url,
        "TOLLGATE_CONFIG": "",
        "TOLLGATE_DATABASE_URL": "",
    }
    restore = ("backup", "restore", "--identity", key, archive)
    for _ in range(KILLS):
        if not run_doomed(rng.randrange(1, LAST_STEP), *restore, **into):
            shutil.rmtree(restored.home.root)  # it was short: again from the beginning
    run(into, *restore)
    assert "balance" in run(into, "reconcile")
    assert "BROKEN" not in run(into, "audit", "verify")

    for name in GATEWAYS:
        restored.journal(name).write_text("\n".join([*asked[name], *answered[name], ""]))
    restored.calendar.write_bytes(days)
    after = Arena(restored, rng)
    await after.start_postgres()
    try:
        await after.finish()
        verdict = await judge(restored)
    finally:
        await after.clean_up()
    assert (verdict.lost, verdict.phantom, verdict.wrong) == ([], [], [])
    assert verdict.answered > 10
    assert embedded.postgres_url(restored.home) != site.database_url

"""The newest schema has all that the last release uses, and asks nothing more of it than its own
did."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrations.releases import last_release, releases
from migrations.runner import BASELINE, migrate
from tests.upgrade.added_migrations import VERSIONS, add_migrations
from tests.upgrade.schema import Definition, Schema, schema_of

UNIQUE = ("p ", "u ", "x ")
"""How the constraints begin by which INSERT ... ON CONFLICT finds a row."""
TELLING = importlib.import_module("migrations.versions.0074_work")
STRICTER: dict[str, str] = {
    f"{each.table}.{TELLING.name_of(each)}": "It says that there is work, and refuses nothing."
    for each in TELLING.WORK
}
"""Constraints and triggers on tables of the last release that are new or say something else, each
with the reason why that release never breaks it; a constraint that allows more is one of them."""


def demands(old: Schema, new: Schema, permitted: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what the new schema lacks, or forbids, of what was so in the old one."""
    yield from demands_on_columns(old, new, permitted)
    yield from (f"{each} is gone" for each in sorted(keys_of(old, new) - keys_of(new, new)))
    for which in ("constraints", "triggers"):
        before, after = getattr(old, which), getattr(new, which)
        for name, definition in after.items():
            if definition.table in old.tables and before.get(name) != definition:
                yield f"{name} is another one: {definition.text}"
    for name, granted in old.grants.items():
        kept = new.grants.get(name, Definition("", "")).text.split(",")
        if granted.table in new.tables and not set(granted.text.split(",")) <= set(kept):
            yield f"{name}: something is no longer granted"


def demands_on_columns(old: Schema, new: Schema, permitted: tuple[str, ...]) -> Iterator[str]:
    for name, was in old.columns.items():
        if {f"drop {name}", f"drop {was.table}"} & {*permitted}:
            continue
        now = new.columns.get(name)
        if now is None:
            yield f"{name} is gone"
        elif now.type != was.type:
            yield f"{name} is {now.type}, not {was.type}"
        elif was.may_be_left_out and not now.may_be_left_out:
            yield f"{name} may not be left out"
        elif now.is_required and not was.is_required and f"not null {name}" not in permitted:
            yield f"{name} may not be NULL"
    for name in new.columns.keys() - old.columns.keys():
        now = new.columns[name]
        if now.table in old.tables and not now.may_be_left_out:
            yield f"{name} may not be left out"


def keys_of(schema: Schema, new: Schema) -> set[str]:
    """Return what makes rows unique, whatever it is named, of the tables that are in `new`."""
    return {
        f"{each.table}: {each.text}"
        for each in schema.constraints.values()
        if each.text.startswith(UNIQUE) and each.table in new.tables
    } | {
        f"{each.table}: {each.text.partition(' ON ')[2]}"
        for each in schema.indexes.values()
        if "UNIQUE INDEX" in each.text and each.table in new.tables
    }


async def test_the_newest_schema_serves_the_last_release(old_url: str) -> None:
    old = await schema_of(old_url)
    await migrate(old_url)
    found = list(demands(old, await schema_of(old_url), last_release().permits))
    unknown = [each for each in found if each.partition(" is another one")[0] not in STRICTER]
    assert unknown == []


BREAKING = {
    "dropped column": 'op.execute("ALTER TABLE files DROP COLUMN expires_at")',
    "renamed column": 'op.execute("ALTER TABLE files RENAME expires_at TO ends_at")',
    "dropped table": 'op.execute("DROP TABLE disputed_usage")',
    "other type": 'op.execute("ALTER TABLE files ALTER COLUMN size_bytes TYPE numeric")',
    "not null": 'op.execute("ALTER TABLE files ALTER COLUMN expires_at SET NOT NULL")',
    "no default": 'op.execute("ALTER TABLE files ALTER COLUMN created_at DROP DEFAULT")',
    "asked for": 'op.execute("ALTER TABLE files ADD COLUMN added text NOT NULL")',
    "key": 'op.execute("ALTER TABLE files DROP CONSTRAINT files_of_org CASCADE")',
    "check": 'op.execute("ALTER TABLE files ADD CONSTRAINT a CHECK (size_bytes > 9) NOT VALID")',
    "other check": """
op.execute("ALTER TABLE files DROP CONSTRAINT files_size")
op.execute("ALTER TABLE files ADD CONSTRAINT files_size CHECK (size_bytes > 9)")
""",
    "trigger": """
op.execute(
    "CREATE TRIGGER added BEFORE DELETE ON files FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
)
""",
    "grant": 'op.execute("REVOKE INSERT ON files FROM tollgate_app")',
}
"""Migrations on which gateways of the last release would fail."""


@pytest.mark.parametrize("body", BREAKING.values(), ids=BREAKING)
async def test_a_schema_that_breaks_the_last_release_is_found(
    body: str, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await schema_of(postgres_url)
    assert list(demands(old, old)) == []
    add_migrations(monkeypatch, tmp_path, body)
    await migrate(postgres_url)
    assert list(demands(old, await schema_of(postgres_url))) != []


async def test_more_that_may_be_left_out_breaks_nothing(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await schema_of(postgres_url)
    more = """
online.add_column("files", "region", "text")
online.add_column("files", "copies", "integer", default="1")
op.execute("CREATE TABLE added (id text PRIMARY KEY, file text NOT NULL REFERENCES files (id))")
walls.share("added")
"""
    add_migrations(monkeypatch, tmp_path, more)
    await migrate(postgres_url)
    assert list(demands(old, await schema_of(postgres_url))) == []


def test_releases_are_in_order_and_their_revisions_are_there() -> None:
    found = releases()
    versions = [tuple(map(int, each.version.split("."))) for each in found]
    assert versions == sorted(set(versions))
    assert [each.revision for each in found] == sorted(each.revision for each in found)
    assert found[0].revision == BASELINE
    known = {file.name[:4] for file in VERSIONS.glob("[0-9]*.py")}
    assert {each.revision for each in found} <= known

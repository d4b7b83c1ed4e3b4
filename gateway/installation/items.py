"""Reads and changes stored settings. Each change grows the number of all, under whose lock it is
checked with everything else that is stored, and stands in the operator's audit log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.queries import Query, ask, ask_all
from billing.tables import AnyRow
from gateway.audit.log import Actor, record
from gateway.columns import SealedColumns, moment, moment_made, text
from gateway.installation.merge import KINDS, Kind, StoredSetting
from gateway.installation.model_versions import UNDER_WAY, RunningModels
from gateway.settings.changes import public
from gateway.settings.sealed_keys import PURPOSE, context_of
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound, ReadOnly

metadata = sa.MetaData()

items = sa.Table(
    "installation_items",
    metadata,
    text("kind", key=True),
    text("name", key=True),
    sa.Column("content", JSONB, nullable=False),
    text("home", nullable=True),
    sa.Column("sealed", sa.LargeBinary, nullable=True),
    text("secret_id", nullable=True),
    sa.Column("version", sa.BigInteger, nullable=False, server_default="1"),
    moment_made(),
    moment_made("updated_at"),
)

SEALED = SealedColumns(
    table=items,
    columns=("sealed",),
    place=("kind", "name"),
    purpose=PURPOSE,
    context=lambda row: context_of(row["kind"], row["name"]),
)

generation = sa.Table(
    "installation_generation",
    metadata,
    sa.Column("only", sa.Boolean, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
)
"""At most one row. Its number grows with each change of an item, in the same transaction."""

homes = sa.Table(
    "installation_homes",
    metadata,
    text("home", key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    text("problem"),
    sa.Column("file_names", JSONB, nullable=False),
    moment("seen_at", nullable=False),
    sa.Column("running", JSONB, nullable=False, server_default="{}"),
)
"""Each `tollgate up` says here which number it looked at, why it refuses what is stored, and which
versions of its models run."""

MAX_ITEMS = 256
"""The bound counts for each kind."""
MAX_CONTENT_BYTES = 64 * 1024
HOME_SEEN = timedelta(minutes=1)
"""A home that was not seen for so long is not running."""


class HomeState(msgspec.Struct, frozen=True, kw_only=True):
    """One `tollgate up` and its last look at what is stored. `number`: of what it looked at last;
    `problem`: why that is not in force there, else empty."""

    home: str
    number: int
    problem: str
    file_names: dict[Kind, list[str]]
    """The names that its settings file takes."""
    seen_at: datetime
    running: RunningModels = RunningModels()

    @property
    def is_changing(self) -> bool:
        """True while another version of a model starts there."""
        return any(each.state in UNDER_WAY for each in self.running.models)


class StoredSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that is stored, at one moment, and where it is in force."""

    number: int
    items: tuple[StoredSetting, ...]
    homes: tuple[HomeState, ...]

    @property
    def file_names(self) -> dict[Kind, set[str]]:
        """Return the names that some home's file takes."""
        found: dict[Kind, set[str]] = {kind: set() for kind in KINDS}
        for home in self.homes:
            for kind, names in home.file_names.items():
                found[kind].update(names)
        return found


CheckAll = Callable[[StoredSettings, Sequence[StoredSetting]], None]
"""Checks what would be stored, beside what is. Raises what says why not."""
CheckItem = Callable[[StoredSetting], None]
Change = Callable[[StoredSetting], StoredSetting]
"""Returns what is wanted instead of an item."""
KEY = ("kind", "name")
CHANGED = ("content", "home", "sealed", "secret_id")


async def read_number(conn: AsyncConnection) -> int:
    """Return how often stored settings were changed; 0: never."""
    return await ask(conn, number_query())


def number_query() -> Query[int]:
    """Return the query of `read_number`."""
    return Query(sa.select(generation.c.number), lambda rows: int(rows[0].number) if rows else 0)


def homes_query(*, is_wanted: bool = True) -> Query[tuple[HomeState, ...]]:
    """Return the query of each `tollgate up` that runs on this database; of none, where that is not
    wanted."""
    running = sa.select(homes).where(homes.c.seen_at > sa.func.now() - HOME_SEEN)
    running = running if is_wanted else running.where(sa.false())
    return Query(
        running.order_by(homes.c.home),
        lambda rows: tuple(map(_to_home, rows)),
    )


def _to_home(row: AnyRow) -> HomeState:
    running = msgspec.convert(row.running, RunningModels)
    return HomeState(**{**row._mapping, "running": running})


async def read_stored(conn: AsyncConnection) -> StoredSettings:
    stored = Query(
        sa.select(items).order_by(items.c.kind, items.c.name),
        lambda rows: tuple(StoredSetting(**row._mapping) for row in rows),
    )
    number, found, running = await ask_all(conn, number_query(), stored, homes_query())
    return StoredSettings(number=number, items=found, homes=running)


async def create_item(
    conn: AsyncConnection,
    item: StoredSetting,
    *,
    check_all: CheckAll,
    operator_org: str,
    actor: Actor,
) -> StoredSetting:
    """Raises: InvalidField, NameTaken, ReadOnly, and what `check_all` raises."""
    stored = await _hold(conn)
    kind, name = item.kind, item.name
    _refuse_name_of_file(stored, kind, name)
    if any((each.kind, each.name) == (kind, name) for each in stored.items):
        raise NameTaken("name", f"there is a {kind} {name!r} already")
    if sum(each.kind == kind for each in stored.items) >= MAX_ITEMS:
        raise InvalidField("name", f"there may be {MAX_ITEMS} of them")
    _check_size(item.content)
    check_all(stored, (*stored.items, item))
    values = {key: getattr(item, key) for key in (*KEY, *CHANGED)}
    added = sa.insert(items).values(**values).returning(items)
    made = StoredSetting(**(await conn.execute(added)).one()._mapping)
    await _record(conn, operator_org, actor, "created", after=made)
    return made


async def replace_item(
    conn: AsyncConnection,
    kind: Kind,
    name: str,
    change: Change,
    *,
    check: CheckItem,
    check_all: CheckAll,
    operator_org: str,
    actor: Actor,
) -> StoredSetting:
    """Raises: InvalidField, NotFound, ReadOnly, and what `change` and the checks raise."""
    stored = await _hold(conn)
    before = find_item(stored, kind, name)
    check(before)
    _refuse_name_of_file(stored, kind, name)
    wanted = change(before)
    _check_size(wanted.content)
    others = (each for each in stored.items if each is not before)
    check_all(stored, (*others, wanted))
    changed = (
        sa.update(items)
        .where(items.c.kind == kind, items.c.name == name)
        .values(
            **{key: getattr(wanted, key) for key in CHANGED},
            version=items.c.version + 1,
            updated_at=sa.func.now(),
        )
        .returning(items)
    )
    after = StoredSetting(**(await conn.execute(changed)).one()._mapping)
    await _record(conn, operator_org, actor, "updated", before=before, after=after)
    return after


async def remove_item(
    conn: AsyncConnection,
    kind: Kind,
    name: str,
    *,
    check: CheckItem,
    check_all: CheckAll,
    operator_org: str,
    actor: Actor,
) -> StoredSetting:
    """Remove it, also where a file hides it. Raises: NotFound, and what the checks raise."""
    stored = await _hold(conn)
    before = find_item(stored, kind, name)
    check(before)
    rest = [each for each in stored.items if each is not before]
    try:
        check_all(stored, rest)
    except InvalidField:
        if _fits(stored, check_all):
            raise
        # What is stored does not fit already, such as to another settings file: less of it helps.
    await conn.execute(sa.delete(items).where(items.c.kind == kind, items.c.name == name))
    await _record(conn, operator_org, actor, "removed", before=before)
    return before


async def report_home(
    conn: AsyncConnection,
    home: str,
    number: int,
    problem: str,
    names: dict[Kind, list[str]],
    running: RunningModels | None = None,
) -> None:
    """Write what a home made of what is stored, and what it runs; homes that are gone for a day are
    forgotten."""
    row = {
        "home": home,
        "number": number,
        "problem": problem,
        "file_names": names,
        "seen_at": sa.func.now(),
        "running": msgspec.to_builtins(running or RunningModels()),
    }
    upsert = insert(homes).values(**row)
    await conn.execute(upsert.on_conflict_do_update(index_elements=["home"], set_=row))
    old = homes.c.seen_at < sa.func.now() - timedelta(days=1)
    await conn.execute(sa.delete(homes).where(old))


def find_item(stored: StoredSettings, kind: Kind, name: str) -> StoredSetting:
    """Raises: NotFound."""
    for each in stored.items:
        if (each.kind, each.name) == (kind, name):
            return each
    raise NotFound("name", f"no {kind} {name!r} is stored")


async def _hold(conn: AsyncConnection) -> StoredSettings:
    """Lock what is stored, until the commit, and count its change."""
    counted = insert(generation).values(only=True, number=1)
    await conn.execute(
        counted.on_conflict_do_update(
            index_elements=["only"], set_={"number": generation.c.number + 1}
        )
    )
    return await read_stored(conn)


def _fits(stored: StoredSettings, check_all: CheckAll) -> bool:
    try:
        check_all(stored, stored.items)
    except InvalidField:
        return False
    return True


async def _record(
    conn: AsyncConnection,
    operator_org: str,
    actor: Actor,
    what: str,
    *,
    before: StoredSetting | None = None,
    after: StoredSetting | None = None,
) -> None:
    """Record a change in the audit log of the operator. One of both items is given."""
    item = after or before
    assert item is not None
    await record(
        conn,
        org_id=operator_org,
        actor=actor,
        action=f"{item.kind}.{what}",
        target=item.name,
        before=None if before is None else _shown(before),
        after=None if after is None else _shown(after),
    )


def _shown(item: StoredSetting) -> dict[str, Any]:
    """Return an item as the audit log shows it: of a key only that there is one."""
    shown: dict[str, Any] = {"content": public(item.content)}
    if item.home is not None:
        return shown | {"home": item.home}
    return shown | ({"api_key": "(not shown)"} if item.sealed is not None else {})


def _refuse_name_of_file(stored: StoredSettings, kind: Kind, name: str) -> None:
    if name in stored.file_names[kind]:
        raise ReadOnly(
            "name", f"the {kind} {name!r} stands in the settings file, and is changed there"
        )


def _check_size(content: dict[str, Any]) -> None:
    if len(msgspec.json.encode(content)) > MAX_CONTENT_BYTES:
        raise InvalidField("content", f"is larger than {MAX_CONTENT_BYTES} bytes")

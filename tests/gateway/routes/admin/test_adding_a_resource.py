"""A resource of administration is added in at most three places: a migration, a module with its
table and the verbs that change it, and a module with its description and routes. Here is one, notes
about an organization, made in a copy of the product that is then used."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.copied_product import copy_product, next_migration, run_copy

MIGRATION = '''\
"""Notes about an organization."""

from alembic import op
from migrations.walls import protect

revision = "9999"
down_revision = "{head}"


def upgrade() -> None:
    op.execute(
        "CREATE TABLE notes (id text PRIMARY KEY, org_id text NOT NULL REFERENCES orgs,"
        " body text NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),"
        " archived_at timestamptz)"
    )
    protect("notes")
'''
VERBS = '''\
"""Keeps notes about an organization."""

from datetime import datetime

import msgspec
import sqlalchemy as sa

from gateway.audit.log import record
from gateway.columns import moment, moment_made, text
from gateway.ids import uuid7
from gateway.tenancy.errors import ArchivedError, NotFound
from gateway.tenancy.tables import metadata

notes = sa.Table(
    "notes",
    metadata,
    *(text("id", key=True), text("org_id"), text("body")),
    *(moment_made(), moment("archived_at")),
)


class NoteRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    body: str
    created_at: datetime
    archived_at: datetime | None


def select_notes(org_id, *, archived):
    listed = sa.select(notes).where(notes.c.org_id == org_id)
    return listed if archived else listed.where(notes.c.archived_at.is_(None))


async def get_note(conn, *, org_id, note_id, lock=False):
    found = select_notes(org_id, archived=True).where(notes.c.id == note_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("note_id", f"no note {note_id!r}")
    return NoteRow(**row._mapping)


async def create_note(conn, *, org_id, body, actor):
    added = sa.insert(notes).values(id=f"note_{uuid7().hex}", org_id=org_id, body=body)
    made = NoteRow(**(await conn.execute(added.returning(notes))).one()._mapping)
    entry = {"action": "note.created", "target": made.id, "after": {"body": body}}
    await record(conn, org_id=org_id, actor=actor, **entry)
    return made


async def change_note(conn, action, values, *, org_id, note_id, actor, check):
    before = await get_note(conn, org_id=org_id, note_id=note_id, lock=True)
    check(before)
    if before.archived_at is not None:
        raise ArchivedError("note_id", "an archived note cannot be changed")
    changed = sa.update(notes).where(notes.c.org_id == org_id, notes.c.id == note_id)
    made = await conn.execute(changed.values(**values).returning(notes))
    after = NoteRow(**made.one()._mapping)
    old, new = ({name: getattr(row, name) for name in values} for row in (before, after))
    entry = {"action": action, "target": note_id, "before": old, "after": new}
    await record(conn, org_id=org_id, actor=actor, **entry)
    return after
'''
ROUTES = '''\
"""/v1/admin/notes: notes about an organization."""

import msgspec
import sqlalchemy as sa

from foundation.structs import patch_of
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminResource
from gateway.tenancy import notes as verbs
from gateway.tenancy.notes import NoteRow
from gateway.wire.shared.page_query import ArchivedPageQuery
from gateway.wire.shared.resource import view_of


class NewNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    body: str


@patch_of(NewNote)
class NotePatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Note(NewNote, frozen=True, kw_only=True):
    object: str = "note"
    id: str
    created_at: int
    archived_at: int | None


notes = AdminResource[NoteRow](
    path="/v1/admin/notes",
    id_name="note_id",
    tag="Notes",
    change=needs("admin:projects"),
    view=Note,
    show=lambda row: view_of(Note, row),
)

list_ = notes.list_all(
    "List the notes",
    ArchivedPageQuery,
    select=lambda org_id, query: verbs.select_notes(org_id, archived=query.include_archived),
    row=NoteRow,
)

retrieve = notes.retrieve("One note", verbs.get_note)


@notes.create("Write a note", NewNote)
async def create(request, wanted):
    async with request.transaction() as conn:
        new = {"org_id": request.org_id, "body": wanted.body, "actor": request.actor}
        return await verbs.create_note(conn, **new)


@notes.update("Write a note anew", NotePatch)
async def update(request, values):
    return await change(request, "note.updated", values)


@notes.archive("Archive a note")
async def archive(request):
    return await change(request, "note.archived", {"archived_at": sa.func.now()})


async def change(request, action, values):
    async with request.transaction() as conn:
        return await verbs.change_note(conn, action, values, **request.ids, **request.change)


routes = [list_, retrieve, create, update, archive]
'''


async def test_a_resource_of_administration_is_added_in_three_places(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    files = next_migration("notes", MIGRATION)
    files |= {"gateway/tenancy/notes.py": VERBS, "gateway/routes/admin/notes.py": ROUTES}
    assert copy_product(tmp_path, files=files) == 3
    arguments = (str(tmp_path), postgres_url, redis_url)
    program = ("-m", "tests.gateway.routes.admin.added_resource", *arguments)
    used = await asyncio.to_thread(run_copy, tmp_path, program)
    assert used.returncode == 0, used.stdout + used.stderr

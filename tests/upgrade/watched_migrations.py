"""Watches what migrations do to tables that were there before, and complains of what gateways would
wait for where such a table is large.

An empty table is enough: a scan of no row is a scan. Within a transaction, which may hold strong
locks, no such table is read or written anew. Outside of one only those statements run whose locks
hinder no reader or writer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event

SMALL = {"alembic_version", "schema_support"}
"""Tables of one row."""
UNHURRIED = re.compile(
    r"(CREATE (UNIQUE )?INDEX CONCURRENTLY|DROP INDEX CONCURRENTLY|ALTER TABLE \w+ VALIDATE"
    r" CONSTRAINT|WITH batch AS MATERIALIZED|SET|RESET|SELECT)\b"
)
FILES = """
SELECT relname, pg_relation_filenode(oid) FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i', 'm')
"""
# What this session has counted and not yet handed over, so it is handed over again and again.
READ = """
SELECT relname FROM pg_stat_xact_user_tables
WHERE coalesce(seq_scan, 0) + coalesce(idx_scan, 0) + n_tup_upd + n_tup_del > 0
"""
HAND_OVER = "SELECT pg_stat_force_next_flush()"
REVISION = "SELECT max(version_num) FROM alembic_version"


class MigrationWatch:
    """Listens to the connections of this process."""

    def __init__(self, files: dict[str, int]) -> None:
        self.complaints: list[str] = []
        self._files = files
        self._is_asking = False

    def before_statement(self, connection: Connection, statement: str) -> None:
        if self._is_asking or not is_autocommit(connection):
            return
        if not UNHURRIED.match(" ".join(statement.split())):
            self.complaints.append(f"outside of a transaction: {statement}")

    def after_statement(self, connection: Connection) -> None:
        if not self._is_asking and is_autocommit(connection):
            self._ask(connection, HAND_OVER)

    def before_commit(self, connection: Connection) -> None:
        files: dict[str, int] = dict(self._ask(connection, FILES))
        if not is_autocommit(connection) and "alembic_version" in files:
            ((revision,),) = self._ask(connection, REVISION)
            read = {name for (name,) in self._ask(connection, READ)}
            for name in sorted(read & self._files.keys() - SMALL):
                self.complaints.append(f"after {revision}: a transaction reads {name}")
            for name in sorted(self._files.keys() & files.keys()):
                if self._files[name] != files[name]:
                    self.complaints.append(f"after {revision}: a transaction rewrites {name}")
        self._files = files
        self._ask(connection, HAND_OVER)

    def _ask(self, connection: Connection, query: str) -> list[tuple[Any, ...]]:
        self._is_asking = True
        try:
            return [tuple(row) for row in connection.exec_driver_sql(query)]
        finally:
            self._is_asking = False


def is_autocommit(connection: Connection) -> bool:
    return connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"


@contextmanager
def watched(files: dict[str, int]) -> Iterator[list[str]]:
    """Yield the complaints about what is done meanwhile. `files`: of the tables that are there."""
    watch = MigrationWatch(files)

    def before(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
        watch.before_statement(connection, statement)

    def after(connection: Connection, *_: Any) -> None:
        watch.after_statement(connection)

    listeners = {
        "before_cursor_execute": before,
        "after_cursor_execute": after,
        "commit": watch.before_commit,
    }
    for name, listener in listeners.items():
        event.listen(Engine, name, listener)
    try:
        yield watch.complaints
    finally:
        for name, listener in listeners.items():
            event.remove(Engine, name, listener)

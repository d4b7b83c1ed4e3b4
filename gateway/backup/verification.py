"""Checks that a backup is whole: without the identity that its bytes are those that were written,
with it that they hold what was backed up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.backup.archive import MANIFEST_SUFFIX, Archive, Identity, Manifest, sum_of
from gateway.backup.cutting import ROW_END
from gateway.backup.errors import BackupError


class Verification(msgspec.Struct, kw_only=True):
    """The result for one backup. `rows`: by table; None: nothing was decrypted."""

    backup: str
    files: int
    bytes: int = 0
    rows: dict[str, int] | None = None
    problems: list[str] = []


def verify(archive: Archive, name: str, identities: Sequence[Identity] = ()) -> Verification:
    """Read all of a backup. Raises: BackupError if it has no list of sums, OSError."""
    try:
        sums = archive.read_sums(name)
    except FileNotFoundError:
        raise BackupError(f"{name}: its list of sums is missing") from None
    found = Verification(backup=name, files=len(sums))
    if f"{name}{MANIFEST_SUFFIX}" not in sums:
        found.problems.append(f"{name}: its list of sums lacks the manifest")
    for file, digest in sorted(sums.items()):
        path = archive.folder / file
        if not path.exists():
            found.problems.append(f"{file} is missing")
            continue
        found.bytes += path.stat().st_size
        if sum_of(path) != digest:
            found.problems.append(f"{file} is not what was written")
    if identities:
        try:
            manifest = archive.read_manifest(name, identities)
        except BackupError as error:
            found.problems.append(str(error))
        else:
            _decrypt(archive, manifest, identities, found)
    return found


def _decrypt(
    archive: Archive, manifest: Manifest, identities: Sequence[Identity], found: Verification
) -> None:
    for chunk in manifest.chunks().values():
        try:
            plain = archive.read_chunk(chunk, manifest.naming_key, identities)
        except BackupError as error:
            found.problems.append(str(error))
            continue
        if chunk.rows and plain.count(ROW_END) != chunk.rows:
            found.problems.append(f"chunk {chunk.name}: not {chunk.rows} rows")
    found.rows = {table.name: table.rows for table in manifest.tables}

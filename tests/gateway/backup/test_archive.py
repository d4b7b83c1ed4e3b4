"""The archive: what is there is not written again, what is damaged is noticed and mended."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyrage
import pytest

from gateway.backup.archive import (
    Archive,
    BackedUpFile,
    BackedUpTable,
    ChunkWriter,
    Identity,
    Manifest,
    NewBackup,
    make_identity,
    read_identities,
    read_recipients,
)
from gateway.backup.errors import BackupError
from gateway.backup.home_files import checked, is_empty, place_files
from gateway.backup.verification import verify
from gateway.home import Home, HomeLock, NoHome

KEY = b"k" * 32
NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)


class Owner:
    """Somebody who makes backups and can read them."""

    def __init__(self, folder: Path, name: str = "backup.key") -> None:
        self.recipient = make_identity(folder / name)
        self.identities: list[Identity] = read_identities(folder / name)

    def back_up(
        self, archive: Archive, rows: Sequence[bytes], *, hours: int = 0, path: str = "a/b"
    ) -> NewBackup:
        with archive.locked():
            writer = ChunkWriter(archive, read_recipients([self.recipient]), KEY)
            chunks = tuple(writer.put(each, rows=each.count(b"\n")) for each in rows)
            file = BackedUpFile(place="home", path=path, chunks=(writer.put(b"content"),))
            return writer.complete(
                Manifest(
                    created_at=NOON + timedelta(hours=hours),
                    release="0",
                    revision="0060",
                    postgres=18,
                    naming_key=KEY,
                    schema_before=(),
                    schema_after=(),
                    tables=(BackedUpTable(name="t", columns=("c",), chunks=chunks),),
                    sequences=(),
                    files=(file,),
                )
            )


@pytest.fixture
def owner(tmp_path: Path) -> Owner:
    return Owner(tmp_path)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "archive")


def chunk_files(archive: Archive) -> list[Path]:
    return sorted((archive.folder / "chunks").iterdir())


def test_what_the_archive_has_is_not_written_again(owner: Owner, archive: Archive) -> None:
    first = owner.back_up(archive, [b"1\n", b"2\n"])
    assert (first.num_chunks, first.num_written) == (3, 3)
    second = owner.back_up(archive, [b"1\n", b"2\n", b"3\n"], hours=1)
    assert (second.num_chunks, second.num_written) == (4, 1)
    for name in archive.backups():
        verdict = verify(archive, name, owner.identities)
        assert verdict.problems == []
    assert verdict.rows == {"t": 3}


def test_others_read_it_with_their_own_tools(
    owner: Owner, archive: Archive, tmp_path: Path
) -> None:
    """The sums are those of sha256sum(1), and a chunk is zlib inside age."""
    row = b"a row of its own\n"
    name = owner.back_up(archive, [row]).name
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", f"{name}.sums"],
        cwd=archive.folder,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sealed = [path.read_bytes() for path in chunk_files(archive)]
    assert not any(row in each or zlib.compress(row) in each for each in sealed)
    assert row in [zlib.decompress(pyrage.decrypt(each, owner.identities)) for each in sealed]
    with pytest.raises(BackupError, match="No matching keys"):
        archive.read_manifest(name, Owner(tmp_path, "stranger.key").identities)


def test_damage_is_named_and_the_next_backup_mends_it(owner: Owner, archive: Archive) -> None:
    name = owner.back_up(archive, [b"1\n", b"2\n"]).name
    damaged, missing, _ = chunk_files(archive)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    missing.unlink()
    problems = verify(archive, name).problems
    assert sorted(problems) == sorted(
        [f"chunks/{damaged.name} is not what was written", f"chunks/{missing.name} is missing"]
    )
    decrypted = verify(archive, name, owner.identities).problems
    assert len(decrypted) == 4 and set(problems) < set(decrypted)
    again = owner.back_up(archive, [b"1\n", b"2\n"], hours=1)
    assert again.num_written == 2
    assert verify(archive, again.name, owner.identities).problems == []


def test_a_chunk_in_the_place_of_another_is_noticed(owner: Owner, archive: Archive) -> None:
    """Anybody can seal to a recipient: the name says what the plain text was."""
    name = owner.back_up(archive, [b"1\n"]).name
    one, two = chunk_files(archive)
    one.write_bytes(two.read_bytes())
    problems = verify(archive, name, owner.identities).problems
    assert any("not what was backed up" in each or "not of the size" in each for each in problems)


def test_a_chunk_that_inflates_beyond_its_size_is_refused(owner: Owner, archive: Archive) -> None:
    name = owner.back_up(archive, [b"1\n"]).name
    manifest = archive.read_manifest(name, owner.identities)
    (chunk,) = manifest.tables[0].chunks
    bomb = zlib.compress(bytes(1 << 24))
    sealed = pyrage.encrypt(bomb, read_recipients([owner.recipient]))
    archive.chunk_path(chunk.name).write_bytes(sealed)
    with pytest.raises(BackupError, match="not of the size"):
        archive.read_chunk(chunk, KEY, owner.identities)


def test_a_killed_writer_leaves_no_backup_and_its_rest_is_removed(
    owner: Owner, archive: Archive
) -> None:
    with archive.locked():
        writer = ChunkWriter(archive, read_recipients([owner.recipient]), KEY)
        writer.put(b"1\n")
        (archive.folder / "chunks" / ".half.age.new").write_bytes(b"half")
    assert archive.backups() == []
    with pytest.raises(BackupError, match="no complete backup"):
        archive.find(None)
    done = owner.back_up(archive, [b"1\n"])
    assert done.num_written == 1  # the file's content; the row was there
    assert not any(path.name.startswith(".") for path in chunk_files(archive))


def test_two_do_not_write_at_once(owner: Owner, archive: Archive) -> None:
    with archive.locked(), pytest.raises(BackupError, match="another backup"):
        owner.back_up(archive, [])


def test_old_backups_go_with_what_only_they_need(owner: Owner, archive: Archive) -> None:
    for hours, rows in enumerate(([b"1\n"], [b"1\n", b"2\n"], [b"2\n", b"3\n"])):
        owner.back_up(archive, rows, hours=hours)
    with archive.locked():
        assert archive.remove_but(2) == (1, 0)
        assert archive.remove_but(1) == (1, 1)
    (name,) = archive.backups()
    assert verify(archive, name, owner.identities).problems == []
    assert len(list(archive.folder.glob("*.sums"))) == 1


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_no_file_is_restored_outside_of_the_home(
    owner: Owner, archive: Archive, tmp_path: Path, path: str
) -> None:
    with pytest.raises(BackupError, match="out of its folder"):
        checked(path)
    name = owner.back_up(archive, [], path=path).name
    manifest = archive.read_manifest(name, owner.identities)
    home = Home(tmp_path / "home")
    with pytest.raises(BackupError, match="out of its folder"):
        place_files(
            manifest,
            home,
            tmp_path / "secret.json",
            lambda chunk: archive.read_chunk(chunk, KEY, owner.identities),
        )
    assert is_empty(home)


def test_recipients_and_identities_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(BackupError, match="no recipient: give --to"):
        read_recipients([])
    with pytest.raises(BackupError, match="recipient 'age1nonsense'"):
        read_recipients(["age1nonsense"])
    file = tmp_path / "backup.key"
    file.write_text("AGE-SECRET-KEY-1NONSENSE\n")
    with pytest.raises(BackupError, match="not a file of age identities") as caught:
        read_identities(file)
    assert "NONSENSE" not in str(caught.value)
    file.write_text("# nothing\n")
    with pytest.raises(BackupError, match="no identity"):
        read_identities(file)
    with pytest.raises(FileExistsError):
        make_identity(file)


def test_no_gateway_starts_in_a_home_whose_restore_is_not_finished(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.create()
    home.restore_journal.write_text("{}")
    for use in (home.create, home.check):
        with pytest.raises(NoHome, match="restore into .* is not finished"):
            use()
    home.create(is_restored=True)
    HomeLock.acquire(home).release()

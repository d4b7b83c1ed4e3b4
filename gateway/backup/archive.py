"""A folder of backups: encrypted chunks, which backups share, and a manifest for each backup.

    ARCHIVE/lock                      flock held by the process that writes
    ARCHIVE/chunks/<name>.age         zlib inside age (age-encryption.org/v1), never changed
    ARCHIVE/<backup>.sums             SHA-256 of each file of a backup, as sha256sum(1) reads it
    ARCHIVE/<backup>.manifest.age     written last: a backup without it is not complete

A chunk is named by an HMAC of its plain text under a key that follows from the installation's
secret and from the recipients: equal content is stored once, and a name tells nothing of it.
Whoever may write to the folder may take a backup away or put in one of his own, since a recipient
is public; he can read none and change no chunk unnoticed.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
import pyrage

from gateway.backup.errors import BackupError
from gateway.secret import sync_folder

MANIFEST_SUFFIX = ".manifest.age"
SUMS_SUFFIX = ".sums"
TIME_FORMAT = "%Y%m%dT%H%M%S.%fZ"
NAME_PATTERN = re.compile(r"backup-\d{8}T\d{6}\.\d{6}Z\Z")
COMPRESSION = 6
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
"""The bound on a manifest's plain text: enough for some millions of chunks."""
MAX_IDENTITY_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024


class Recipient(Protocol):
    """A key that chunks are sealed to (`pyrage.x25519.Recipient`, `pyrage.ssh.Recipient`)."""


class Identity(Protocol):
    """The secret half of a recipient."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A reference to a chunk. `size`: bytes of its plain text; `rows`: those of a table in it."""

    name: str
    size: int
    rows: int = 0


class BackedUpTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the schema `public`; `columns`: those that are not generated, in COPY's order."""

    name: str
    columns: tuple[str, ...]
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)


class BackedUpSequence(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    last_value: int
    is_called: bool


Place = Literal["home", "secret", "beside"]
"""Under the home; the secret's file; and what lies outside, such as the settings' file."""


class BackedUpFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file; `path` is relative to its place, with `/` between names."""

    place: Place
    path: str
    chunks: tuple[Chunk, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All of one backup. `naming_key` names its chunks; `postgres`: the server's version number."""

    version: Literal[1] = 1
    created_at: datetime
    release: str
    revision: str
    postgres: int
    naming_key: bytes
    schema_before: tuple[Chunk, ...]
    schema_after: tuple[Chunk, ...]
    tables: tuple[BackedUpTable, ...]
    sequences: tuple[BackedUpSequence, ...]
    files: tuple[BackedUpFile, ...]

    def chunks(self) -> dict[str, Chunk]:
        """Return every chunk by its name."""
        groups = [self.schema_before, self.schema_after]
        groups += [table.chunks for table in self.tables]
        groups += [file.chunks for file in self.files]
        return {chunk.name: chunk for group in groups for chunk in group}


class NewBackup(NamedTuple):
    """A backup that was completed. `num_written`: its chunks that the archive did not have."""

    name: str
    num_chunks: int
    num_written: int


class Archive:
    """The folder. Constructing it creates nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._chunks = self.folder / "chunks"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, hold its lock, and remove what a killed writer left unfinished.

        Raises: BackupError if another process writes to it, OSError.
        """
        self._chunks.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupError(f"{self.folder}: another backup is being written") from None
            for path in (*self.folder.glob(".*.new"), *self._chunks.glob(".*.new")):
                path.unlink()
            yield
        finally:
            os.close(fd)

    def backups(self) -> list[str]:
        """Return the names of the complete backups, oldest first."""
        names = (path.name.removesuffix(MANIFEST_SUFFIX) for path in self.folder.glob("backup-*"))
        return sorted(
            name for name in names if NAME_PATTERN.match(name) and self._manifest(name).exists()
        )

    def find(self, name: str | None) -> str:
        """Return the backup `name`, or the newest. Raises: BackupError if there is none."""
        known = self.backups()
        if not known:
            raise BackupError(f"{self.folder} holds no complete backup")
        if name is not None and name not in known:
            raise BackupError(f"{self.folder} holds no backup {name!r}; the newest is {known[-1]}")
        return known[-1] if name is None else name

    def read_sums(self, name: str) -> dict[str, str]:
        """Return the SHA-256 of each sealed file of a backup, by its path in the archive.

        Raises: BackupError, OSError.
        """
        path = self.folder / f"{name}{SUMS_SUFFIX}"
        sums: dict[str, str] = {}
        for line in path.read_text().splitlines():
            digest, mark, file = line.partition("  ")
            if not mark or len(digest) != 64 or ".." in file or file.startswith("/"):
                raise BackupError(f"{path}: not a list of sums")
            sums[file] = digest
        return sums

    def read_manifest(self, name: str, identities: Sequence[Identity]) -> Manifest:
        """Raises: BackupError, OSError."""
        path = self._manifest(name)
        plain = unseal(path, identities, MAX_MANIFEST_BYTES)
        try:
            return msgspec.json.decode(plain, type=Manifest)
        except msgspec.DecodeError as error:
            raise BackupError(f"{path}: {error}") from None

    def digest_of(self, manifest_name: str) -> str:
        """Return the SHA-256 of a sealed manifest, by which a backup is known."""
        return sum_of(self._manifest(manifest_name))

    def read_chunk(self, chunk: Chunk, key: bytes, identities: Sequence[Identity]) -> bytes:
        """Return a chunk's plain text, which is what its name says.

        Raises: BackupError, OSError.
        """
        path = self.chunk_path(chunk.name)
        plain = unseal(path, identities, chunk.size)
        if not hmac.compare_digest(name_of(plain, key), chunk.name):
            raise BackupError(f"{path}: it is not what was backed up")
        return plain

    def chunk_path(self, name: str) -> Path:
        if re.fullmatch(r"[0-9a-f]{64}", name) is None:
            raise BackupError(f"{name[:80]!r} is no chunk's name")
        return self._chunks / f"{name}.age"

    def relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def remove_but(self, keep: int) -> tuple[int, int]:
        """Remove all backups but the newest `keep`, and the chunks that none of those has.

        Returns how many backups and chunks were removed. Raises: BackupError, OSError.
        """
        known = self.backups()
        old, kept = known[:-keep], known[-keep:]
        used = {file for name in kept for file in self.read_sums(name)}
        for name in old:  # first the manifest: without it a backup is not complete
            self._manifest(name).unlink()
            (self.folder / f"{name}{SUMS_SUFFIX}").unlink(missing_ok=True)
        for stray in self.folder.glob(f"backup-*{SUMS_SUFFIX}"):
            if stray.name.removesuffix(SUMS_SUFFIX) not in kept:
                stray.unlink()
        num_removed = 0
        for path in self._chunks.glob("*.age"):
            if self.relative(path) not in used:
                path.unlink()
                num_removed += 1
        return len(old), num_removed

    def _manifest(self, name: str) -> Path:
        return self.folder / f"{name}{MANIFEST_SUFFIX}"


class ChunkWriter:
    """Writes the chunks of one backup; one that the archive has is not written again."""

    def __init__(
        self, archive: Archive, recipients: Sequence[Recipient], naming_key: bytes
    ) -> None:
        self._archive, self._recipients = archive, list(recipients)
        self.naming_key = naming_key
        self._known: dict[str, str] = {}
        for name in archive.backups():
            self._known |= archive.read_sums(name)
        self._sums: dict[str, str] = {}
        self.num_written = 0

    def put(self, plain: bytes, *, rows: int = 0) -> Chunk:
        """Store a chunk; it is on disk when this returns. Raises: OSError."""
        name = name_of(plain, self.naming_key)
        path = self._archive.chunk_path(name)
        file = self._archive.relative(path)
        if file not in self._sums:
            found = sum_of(path) if path.exists() else None
            if found is None or self._known.get(file, found) != found:  # missing, or damaged
                sealed = pyrage.encrypt(zlib.compress(plain, COMPRESSION), self._recipients)
                write_whole(path, sealed)
                found = hashlib.sha256(sealed).hexdigest()
                self.num_written += 1
            self._sums[file] = found
        return Chunk(name, len(plain), rows)

    def complete(self, manifest: Manifest) -> NewBackup:
        """Write the manifest, which makes the backup complete. Raises: BackupError, OSError."""
        folder = self._archive.folder
        name = f"backup-{manifest.created_at.astimezone(UTC).strftime(TIME_FORMAT)}"
        path = folder / f"{name}{MANIFEST_SUFFIX}"
        if path.exists():
            raise BackupError(f"{path} is there already: did the clock go back?")
        plain = msgspec.json.encode(manifest)
        sealed = pyrage.encrypt(zlib.compress(plain, COMPRESSION), self._recipients)
        sums = self._sums | {path.name: hashlib.sha256(sealed).hexdigest()}
        lines = "".join(f"{digest}  {file}\n" for file, digest in sorted(sums.items()))
        sync_folder(folder / "chunks")
        write_whole(folder / f"{name}{SUMS_SUFFIX}", lines.encode())
        write_whole(path, sealed)
        sync_folder(folder)
        return NewBackup(name, len(self._sums), self.num_written)


def name_of(plain: bytes, key: bytes) -> str:
    return hmac.digest(key, plain, hashlib.sha256).hex()


def unseal(path: Path, identities: Sequence[Identity], max_bytes: int) -> bytes:
    """Decrypt and inflate a file to at most `max_bytes`. Raises: BackupError, OSError."""
    try:
        compressed = pyrage.decrypt(path.read_bytes(), list(identities))
    except FileNotFoundError:
        raise BackupError(f"{path} is missing") from None
    except pyrage.DecryptError as error:
        raise BackupError(f"{path}: {error}") from None
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(compressed, max_bytes + 1)
    except zlib.error as error:
        raise BackupError(f"{path}: {error}") from None
    if len(plain) > max_bytes or not inflater.eof:
        raise BackupError(f"{path}: not of the size that the backup says")
    return plain


def sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, on disk when this returns but for its name.

    Raises: OSError.
    """
    beside = unfinished(path)
    beside.unlink(missing_ok=True)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """Return the name that a file has while it is written; a killed writer leaves it."""
    return path.with_name(f".{path.name}.new")


def read_recipients(texts: Sequence[str]) -> list[Recipient]:
    """Read recipients as people write them: `age1...`, or an `ssh-...` public key.

    Raises: BackupError, which shows the text: it is public.
    """
    if not texts:
        raise BackupError(
            "no recipient: give --to age1..., or set recipients under [backup]; "
            "`tollgate backup key FILE` makes a key"
        )
    found: list[Recipient] = []
    for text in texts:
        kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
        try:
            found.append(kind.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise BackupError(f"recipient {text[:100]!r}: {error}") from None
    return found


def read_identities(path: Path) -> list[Identity]:
    """Read the identities of a file as age-keygen(1) or ssh-keygen(1) writes it.

    Raises: BackupError, which never shows the content; OSError.
    """
    with path.open("rb") as file:
        content = file.read(MAX_IDENTITY_BYTES)
    try:
        if content.startswith(b"-----BEGIN"):
            return [pyrage.ssh.Identity.from_buffer(content)]
        lines = (line.strip() for line in content.decode().splitlines())
        found = [pyrage.x25519.Identity.from_str(line) for line in lines if line and line[0] != "#"]
    except (pyrage.IdentityError, UnicodeDecodeError):
        raise BackupError(f"{path}: not a file of age identities") from None
    if not found:
        raise BackupError(f"{path}: no identity stands in it")
    return found


def make_identity(path: Path) -> str:
    """Write a new identity to `path`, for this user alone, and return its recipient.

    Raises: FileExistsError, OSError.
    """
    identity = pyrage.x25519.Identity.generate()
    recipient = str(identity.to_public())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        file.write(f"# public key: {recipient}\n{identity}\n")
        file.flush()
        os.fsync(fd)
    return recipient

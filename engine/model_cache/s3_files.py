"""Reads the objects under a prefix of an S3-compatible store.

A store says nothing of its objects that tells their content for sure: an ETag is their MD5 here and
something else there. So SHA256SUMS lies beside them, as `sha256sum * > SHA256SUMS` writes it, or
whoever fetches them names the version that they must be.

An object is asked for in ranges: each has the deadline of a request, one that broke is asked for
again, and only while the object is the same (`If-Match`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import ConfigError
from engine.model_cache.remote_files import Checksum, RemoteFile, SourceAway
from engine.model_cache.sources import ModelSource
from engine.text.hub_weights import SHA256

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Config, S3Store

SUMS_FILE = "SHA256SUMS"
MAX_SUMS_BYTES = 1 << 20
MAX_OBJECTS = 10_000
RANGE_BYTES = 16 << 20
MAX_RETRIES = 3
MAX_LINE_CHARS = 300
REFUSAL = re.compile(r"status code: (4(?!08|29)\d\d[\w ]*)")
"""An answer in which asking again changes nothing; to a list, obstore has no error of its own."""


class S3Access(NamedTuple):
    """How a store is reached. Without keys, and if it is not `anonymous`, the credentials are those
    that the environment gives (`AWS_*`, or the role of the machine)."""

    endpoint: str | None = None
    """None: Amazon's of the region."""
    region: str | None = None
    """None: as the environment has it, or us-east-1."""
    access_key: str | None = None
    secret_key: str | None = None
    anonymous: bool = False
    path_style: bool = True
    connect_timeout_s: float = 5.0
    timeout_s: float = 60.0
    """The deadline of one request, including its retries."""

    def __repr__(self) -> str:
        return f"S3Access(endpoint={self.endpoint!r}, region={self.region!r})"


class S3Files:
    """The objects of a source, as the store listed them."""

    def __init__(self, source: ModelSource, access: S3Access) -> None:
        """List the objects. Raises: ConfigError, SourceAway."""
        self.source = source
        with store_errors_explained(source, ""):
            self._store = open_store(source, access)
            self._etags = self._list()
        if not self._etags:
            raise ConfigError(f"{source}: the store has no object there")
        sums = self._read_sums()
        self.files: Mapping[str, RemoteFile] = {
            name: RemoteFile(size, Checksum("sha256", sums[name]) if name in sums else None)
            for name, (size, _) in self._etags.items()
            if name != SUMS_FILE
        }
        listed = "\n".join(f"{name} {found}" for name, found in sorted(self._etags.items()))
        self.state = hashlib.sha256(listed.encode()).hexdigest()

    def read(self, name: str, start: int) -> Iterator[bytes]:
        """Raises: SourceAway, ConfigError."""
        import obstore

        size, etag = self._etags[name]
        while start < size:
            end = min(start + RANGE_BYTES, size)
            options: GetOptions = {"range": (start, end)}
            if etag is not None:
                options["if_match"] = etag
            with store_errors_explained(self.source, name):
                found = obstore.get(self._store, self._key(name), options=options)
                piece = bytes(found.bytes())
            if len(piece) != end - start:
                raise SourceAway(f"{name} broke off")
            yield piece
            start = end

    def _list(self) -> dict[str, tuple[int, str | None]]:
        """Return size and ETag of the objects, by their names below the prefix."""
        import obstore

        found: dict[str, tuple[int, str | None]] = {}
        start = len(self._key(""))
        for page in obstore.list(self._store, self.source.place or None):
            for each in page:
                found[each["path"][start:]] = each["size"], each["e_tag"]
            if len(found) > MAX_OBJECTS:
                raise ConfigError(
                    f"{self.source} has more than {MAX_OBJECTS} objects: name the prefix of one "
                    "model"
                )
        return found

    def _read_sums(self) -> Mapping[str, str]:
        """Return the SHA-256 of files, by their names. Raises: ConfigError, SourceAway."""
        if SUMS_FILE not in self._etags:
            return {}
        if self._etags[SUMS_FILE][0] > MAX_SUMS_BYTES:
            raise ConfigError(f"{self.source}/{SUMS_FILE} is longer than {MAX_SUMS_BYTES} bytes")
        written = b"".join(self.read(SUMS_FILE, 0)).decode(errors="replace")
        found = {}
        for number, line in enumerate(written.splitlines(), 1):
            digest, _, name = line.partition(" ")
            if not SHA256.fullmatch(digest) or name[:1] not in (" ", "*"):
                raise ConfigError(
                    f"{self.source}/{SUMS_FILE}: line {number} is none as `sha256sum` writes it"
                )
            found[name[1:].removeprefix("./")] = digest
        return found

    def _key(self, name: str) -> str:
        return f"{self.source.place}/{name}" if self.source.place else name


def open_store(source: ModelSource, access: S3Access) -> S3Store:
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{source} needs obstore, which the extra "s3" of the package tollgate installs'
        ) from error

    timeout = timedelta(seconds=access.timeout_s)
    where: S3Config = {"virtual_hosted_style_request": not access.path_style}
    if access.region is not None:
        where["region"] = access.region
    if access.endpoint is not None:
        where["endpoint"] = access.endpoint
    if access.anonymous:
        where["skip_signature"] = True
    elif access.access_key is not None and access.secret_key is not None:
        where["access_key_id"] = access.access_key
        where["secret_access_key"] = access.secret_key
    return S3Store(
        source.name,
        config=where,
        client_options={
            "allow_http": True,  # as the endpoint says; what comes is verified
            "connect_timeout": timedelta(seconds=access.connect_timeout_s),
            "timeout": timeout,
        },
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timeout},
    )


@contextmanager
def store_errors_explained(source: ModelSource, name: str) -> Iterator[None]:
    """Turn what obstore raises into ConfigError or SourceAway. Its first line has the address of
    the object and what the store says, and no credential."""
    try:
        from obstore import exceptions
    except ModuleNotFoundError:  # `open_store` says so
        yield
        return
    at = f"{source}/{name}" if name else str(source)
    try:
        yield
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise ConfigError(
            f"{at}: the store refuses the credentials, or lets them not read"
        ) from error
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        raise ConfigError(f"{at}: the store has no such bucket or object") from error
    except exceptions.PreconditionError as error:
        raise ConfigError(f"{at} was replaced while it was fetched; start again") from error
    except exceptions.BaseError as error:
        if found := REFUSAL.search(str(error)):
            raise ConfigError(f"{at}: the store answers {found[1].strip()}") from error
        line = str(error).partition("\n")[0]
        raise SourceAway(f"{at}: {line[:MAX_LINE_CHARS]}") from error

"""The launch specs of MCP servers that may be started on this machine: the operator's list.

Starts nothing. Tenants give values for the credentials that a spec names; they cannot say what is
run. An approval is bound to `LaunchSpec.to_canonical`: a command that changes after it was approved
(CVE-2025-54136, "MCPoison") is another pin.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mcp_bridge.upstream.launch_errors import BadLaunch, DigestMismatch

MAX_ARGS = 64
MAX_ARG_BYTES = 4096
MAX_NAMES = 64
"""Fixed values, and credentials, of one spec."""
MAX_VALUE_BYTES = 32 * 1024
MAX_PATHS = 64
MAX_TREE_FILES = 100_000
MAX_HASHED_BYTES = 4 * 1024**3
"""Bytes of all files that one spec pins."""
CHUNK_BYTES = 1024 * 1024

SPEC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
IMAGE = re.compile(r"[^@\s]{1,400}@sha256:[0-9a-f]{64}", re.ASCII)
STEERS = re.compile(
    r"(?i:LD_.*|DYLD_.*|PYTHON.*|NODE_.*|NPM_CONFIG_.*|UV_.*|PIP_.*|PERL5?.*|RUBY.*|GEM_.*|JAVA_.*"
    r"|_JAVA_OPTIONS|JDK_.*|CLASSPATH|BASH_.*|ENV|IFS|SHELL.*|PS4|PROMPT_COMMAND|GIT_.*|GCONV_PATH"
    r"|DOTNET_.*|DOCKER_.*|SSL_CERT_.*|OPENSSL_.*|.*_PROXY|PATH|HOME|PWD|TMPDIR|LANG|LC_.*|TZ.*)"
)
"""Variables that decide what a process loads, runs or connects to; no tenant may set them."""


class FileDigest(msgspec.Struct, frozen=True, kw_only=True, tag="file", tag_field="kind"):
    """The digest of one file by its content: hexadecimal SHA-256."""

    path: str
    sha256: str


class TreeDigest(msgspec.Struct, frozen=True, kw_only=True, tag="tree", tag_field="kind"):
    """The digest of a folder, such as an installed package: its `tree_sha256`."""

    path: str
    sha256: str


class ImageDigest(msgspec.Struct, frozen=True, kw_only=True, tag="image", tag_field="kind"):
    """The digest of a container image, `repository@sha256:...`, which must be one of the arguments:
    the container engine compares it."""

    reference: str


Digest = FileDigest | TreeDigest | ImageDigest


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one server process (setrlimit(2)); each is hard."""

    data_bytes: int = 2 * 1024**3
    """Writable memory (RLIMIT_DATA)."""
    address_space_bytes: int = 64 * 1024**3
    """Mapped memory. Runtimes such as V8 reserve much more than they use."""
    cpu_s: int = 3600
    """Processor time over the whole life of the process."""
    open_files: int = 1024
    processes: int = 256
    """Processes and threads of its uid, if it has one of its own."""
    file_bytes: int = 256 * 1024**2
    """The size of each file that it writes."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server of the operator's list."""

    name: str
    command: str
    """An absolute path, which does not depend on PATH."""
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Fixed values, the same for all owners and not secret."""
    credential_names: tuple[str, ...] = ()
    """Names of variables that are set from the vault, for each owner."""
    digests: tuple[Digest, ...] = ()
    """Compared before each start."""
    readable: tuple[str, ...] = ()
    """Paths that a sandboxed server can read besides those of the system."""
    network: bool = True
    """False: a sandboxed server has no network."""
    limits: ProcessLimits = ProcessLimits()

    def check(self) -> None:
        """Raises: BadLaunch, which names the field."""
        _check_name(self)
        _check_texts(self)
        _check_names(self)
        _check_digests(self)
        for field, value in msgspec.structs.asdict(self.limits).items():
            if value <= 0:
                raise BadLaunch(self.name, f"limits.{field}", "must be more than 0")

    def to_canonical(self) -> dict[str, Any]:
        """Return what is pinned, as JSON values: everything but name, limits and the values of
        credentials."""
        whole: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        del whole["name"], whole["limits"]
        whole["credential_names"] = sorted(whole["credential_names"])
        whole["readable"] = sorted(whole["readable"])
        return whole


def filled_environment(spec: LaunchSpec, credentials: Mapping[str, str]) -> dict[str, str]:
    """Return all variables that the spec names, with their values.

    Raises: BadLaunch, which names a missing variable, an unknown one, or one with an invalid value.
    """
    for name, value in credentials.items():
        field = f"credentials.{name[:128]}"
        if name not in spec.credential_names:
            raise BadLaunch(spec.name, field, "is no credential of this server")
        if "\0" in value or len(value.encode(errors="replace")) > MAX_VALUE_BYTES:
            raise BadLaunch(spec.name, field, f"longer than {MAX_VALUE_BYTES} bytes, or with a NUL")
    for name in spec.credential_names:
        if name not in credentials:
            raise BadLaunch(spec.name, f"credentials.{name}", "is missing")
    return {**spec.environment, **credentials}


def check_on_disk(spec: LaunchSpec) -> None:
    """Compare the files of a spec with their pinned digests; it blocks.

    A file may change between this and the start, or later: the folders must be the operator's.
    Raises: BadLaunch, if the command cannot be run; DigestMismatch.
    """
    if not os.path.isfile(spec.command) or not os.access(spec.command, os.X_OK):
        raise BadLaunch(spec.name, "command", "is no file that can be run")
    budget = Budget(spec.name)
    for digest in spec.digests:
        if isinstance(digest, ImageDigest):
            continue  # `check` found it among the arguments
        path = Path(digest.path)
        try:
            if isinstance(digest, FileDigest):
                found = file_sha256(path, budget)
            else:
                found = tree_sha256(path, budget)
        except OSError as error:
            raise DigestMismatch(spec.name, f"{path}: {error.strerror}") from None
        if found != digest.sha256:
            raise DigestMismatch(spec.name, f"{path} is not what was pinned")


class Budget:
    """Bounds how much is read for one spec."""

    def __init__(self, upstream: str = "") -> None:
        self._upstream = upstream
        self._files = MAX_TREE_FILES
        self._bytes = MAX_HASHED_BYTES

    def take(self, files: int = 0, size_bytes: int = 0) -> None:
        """Raises: DigestMismatch."""
        self._files -= files
        self._bytes -= size_bytes
        if self._files < 0 or self._bytes < 0:
            raise DigestMismatch(self._upstream, "more than can be compared before a start")


def file_sha256(path: Path, budget: Budget) -> str:
    """Raises: OSError; DigestMismatch, for more than the budget."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            budget.take(size_bytes=len(chunk))
            digest.update(chunk)
    return digest.hexdigest()


def tree_sha256(root: Path, budget: Budget | None = None) -> str:
    """Return the digest of a folder: SHA-256 over `KIND MODE PATH CONTENT` of each entry, separated
    by NUL, sorted by the bytes of their paths. MODE is `x` for executables; the content of a link
    is its target.

    Raises: OSError, DigestMismatch.
    """
    budget = budget or Budget()
    digest = hashlib.sha256()
    for path in sorted(_walk(root, budget), key=lambda each: os.fsencode(each)):
        mode = path.lstat().st_mode
        runs = "x" if mode & 0o111 else "-"
        if stat.S_ISLNK(mode):
            kind, content = "link", os.readlink(path)
        elif stat.S_ISREG(mode):
            kind, content = "file", file_sha256(path, budget)
        else:
            kind, content = "other", ""
        name = os.fsencode(path.relative_to(root))
        for part in (kind.encode(), runs.encode(), name, os.fsencode(content)):
            digest.update(part + b"\0")
    return digest.hexdigest()


def _walk(root: Path, budget: Budget) -> Iterator[Path]:
    """Yield all files and links."""
    folders = [root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                budget.take(files=1)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    yield Path(entry.path)


def _check_name(spec: LaunchSpec) -> None:
    if SPEC_NAME.fullmatch(spec.name) is None:
        raise BadLaunch(spec.name[:64], "name", "letters, digits, _ and -, at most 64")
    if not os.path.isabs(spec.command) or len(spec.command) > MAX_ARG_BYTES:
        raise BadLaunch(spec.name, "command", "must be an absolute path")


def _check_texts(spec: LaunchSpec) -> None:
    if len(spec.args) > MAX_ARGS or len(spec.readable) > MAX_PATHS:
        field, most = ("args", MAX_ARGS) if len(spec.args) > MAX_ARGS else ("readable", MAX_PATHS)
        raise BadLaunch(spec.name, field, f"more than {most}")
    texts = [("command", spec.command)]
    texts += [(f"args[{at}]", text) for at, text in enumerate(spec.args)]
    texts += [(f"readable[{at}]", text) for at, text in enumerate(spec.readable)]
    for field, text in texts:
        if "\0" in text or len(text.encode(errors="replace")) > MAX_ARG_BYTES:
            raise BadLaunch(spec.name, field, f"longer than {MAX_ARG_BYTES} bytes, or with a NUL")
    for at, path in enumerate(spec.readable):
        if not os.path.isabs(path):
            raise BadLaunch(spec.name, f"readable[{at}]", "must be an absolute path")


def _check_names(spec: LaunchSpec) -> None:
    for field, names in (
        ("environment", tuple(spec.environment)),
        ("credential_names", spec.credential_names),
    ):
        if len(names) > MAX_NAMES or len(set(names)) != len(names):
            raise BadLaunch(spec.name, field, f"more than {MAX_NAMES}, or one of them twice")
        for name in names:
            if ENVIRONMENT_NAME.fullmatch(name) is None:
                raise BadLaunch(spec.name, f"{field}.{name[:128]}", "is no variable's name")
    for name, value in spec.environment.items():
        if "\0" in value or len(value.encode(errors="replace")) > MAX_VALUE_BYTES:
            raise BadLaunch(spec.name, f"environment.{name}", "too long, or with a NUL")
    for name in spec.credential_names:
        if STEERS.fullmatch(name) is not None:
            field = f"credential_names.{name}"
            raise BadLaunch(spec.name, field, "says what the process loads: never a tenant's")
        if name in spec.environment:
            raise BadLaunch(spec.name, f"credential_names.{name}", "has a fixed value already")


def _check_digests(spec: LaunchSpec) -> None:
    if len(spec.digests) > MAX_PATHS:
        raise BadLaunch(spec.name, "digests", f"more than {MAX_PATHS}")
    for at, digest in enumerate(spec.digests):
        field = f"digests[{at}]"
        if isinstance(digest, ImageDigest):
            if IMAGE.fullmatch(digest.reference) is None:
                raise BadLaunch(spec.name, field, "is no image@sha256:...")
            if digest.reference not in spec.args:
                raise BadLaunch(spec.name, field, "does not stand among the arguments")
        elif not os.path.isabs(digest.path) or SHA256.fullmatch(digest.sha256) is None:
            raise BadLaunch(spec.name, field, "an absolute path and 64 hexadecimal digits")

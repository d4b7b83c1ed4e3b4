"""Reads and writes HOME/credentials.json, and makes the example that `tollgate up` prints with it.

The keys in it were made by `processes.bootstrap` at the first start and are kept nowhere else; the
address follows each start.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gateway.secret import sync_folder


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """The data that a person needs to call this gateway. `base_url` is the official SDK's."""

    base_url: str
    api_key: str
    admin_key: str

    def __repr__(self) -> str:
        return f"Credentials(base_url={self.base_url!r})"


def read(path: Path) -> Credentials | None:
    """Read the file; None if there is none. Raises: OSError, msgspec.DecodeError."""
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=Credentials)


def write(path: Path, credentials: Credentials) -> None:
    """Replaces the file as a whole, on disk when this returns. Raises: OSError."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(credentials)) + b"\n")
        file.flush()
        os.fsync(descriptor)
    beside.rename(path)
    sync_folder(path.parent)


def curl_example(base_url: str, model: str, path: Path, api_key: str | None) -> str:
    """Return a call, ready to paste.

    With `api_key` None it reads the file at `path` itself, for an output that is kept (a log) and
    must not hold a key.
    """
    key = api_key
    if key is None:
        key = r"""$(sed -n 's/.*"api_key": *"\([^"]*\)".*/\1/p' '""" + f"{path}')"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"""curl {base_url}/chat/completions \\
  -H "Authorization: Bearer {key}" \\
  -H "Content-Type: application/json" \\
  -d '{body}'"""

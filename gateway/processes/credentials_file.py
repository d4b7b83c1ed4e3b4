"""Reads and writes HOME/credentials.json, and makes the examples that `tollgate up` prints with it.

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


def examples(base_url: str, model: str, path: Path, api_key: str | None) -> str:
    """Return a curl and a Python call, ready to paste.

    With `api_key` None they read the file at `path` themselves, for an output that is kept (a log)
    and must not hold a key.
    """
    if api_key is None:
        sed = r"""$(sed -n 's/.*"api_key": *"\([^"]*\)".*/\1/p' '""" + f"{path}')"
        python_key = f'json.load(open("{path}"))["api_key"]'
    else:
        sed, python_key = api_key, f'"{api_key}"'
    sdk = "# pip install openai"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    imports = "import json\n\n" if api_key is None else ""
    return f"""curl {base_url}/chat/completions \\
  -H "Authorization: Bearer {sed}" \\
  -H "Content-Type: application/json" \\
  -d '{body}'

{imports}from openai import OpenAI  {sdk}

client = OpenAI(base_url="{base_url}", api_key={python_key})
stream = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Hello!"}}], stream=True
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
"""

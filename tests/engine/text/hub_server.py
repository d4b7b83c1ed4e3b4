"""A hub on loopback: what huggingface_hub asks of one, and a connection that breaks when told to.

GET  /api/models/{id}[/revision/{rev}]      commit and files
GET  /api/models/{id}/tree/{commit}         files with sizes and ids
HEAD, GET /{id}/resolve/{rev}/{file}        ETag, X-Repo-Commit, ranges
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[3]
RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
API = re.compile(
    r"/api/models/(?P<name>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/?]+))?"
)


def commit_of(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False


class Hub:
    """A context manager; `url` is what HF_ENDPOINT is set to."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        """(method, path, range) of each request, in order."""
        self.cut_once: set[str] = set()
        """Files whose next download breaks off in the middle."""
        self.stall_once: set[str] = set()
        """Files whose next download stands still in the middle until whoever asked is gone."""
        self.stalled = threading.Event()
        self.gates: dict[str, threading.Event] = {}
        """Files that are sent once their events are set."""
        self.damaged: set[str] = set()
        """Files of which one bit is sent wrong."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody answers any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def push(self, name: str, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """A new commit on `branch`; its hash."""
        commit = commit_of(files)
        repository = self.repositories.setdefault(name, Repository())
        repository.commits[commit] = dict(files)
        repository.branches[branch] = commit
        return commit

    def push_folder(self, name: str, folder: Path) -> str:
        files = [path for path in folder.iterdir() if path.is_file()]
        return self.push(name, {path.name: path.read_bytes() for path in files})

    def downloaded(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        found = [RESOLVE.fullmatch(path) for method, path, _ in self.requests if method == "GET"]
        return [match["file"] for match in found if match]

    def environment(self, home: Path, **extra: str) -> dict[str, str]:
        """For a process that shall know this hub, and keep its cache under `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(home)} | extra


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """The hub's list of requests says it all."""

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        match = RESOLVE.fullmatch(path) or API.fullmatch(path)
        if match is None:
            return self._refuse(404, "")
        repository = self.hub.repositories.get(match["name"])
        if repository is None:
            return self._refuse(404, "RepoNotFound")
        revision = match["revision"] or "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if "file" not in match.groupdict():
            return self._send(200, json.dumps(_describe(match, commit, files)).encode(), {})
        if repository.gated:
            return self._refuse(403, "GatedRepo")
        if match["file"] not in files:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(match["file"], files[match["file"]], commit)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    def _send_file(self, name: str, content: bytes, commit: str) -> None:
        headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if name in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.command == "GET" and name in self.hub.gates:
            self.hub.gates[name].wait(120)
        status, asked = 200, self.headers.get("Range")
        if asked is not None:
            first = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[first:]
        if self.command == "GET" and name in self.hub.stall_once:
            self.hub.stall_once.remove(name)
            self._send(status, content, headers, cut_at=len(content) // 2)
            self.hub.stalled.set()
            with suppress(OSError):
                self.connection.recv(1)
        elif self.command == "GET" and name in self.hub.cut_once:
            self.hub.cut_once.remove(name)
            self._send(status, content, headers, cut_at=len(content) // 2)
        else:
            self._send(status, content, headers)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], cut_at: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut_at])
        if cut_at is not None:
            self.close_connection = True


def _describe(match: re.Match[str], commit: str, files: Mapping[str, bytes]) -> Any:
    if match["what"] == "tree":
        return [
            {"type": "file", "path": name, "size": len(content), "oid": _blob(content)}
            for name, content in files.items()
        ]
    siblings = [
        {"rfilename": name, "size": len(content), "blobId": _blob(content), **_large(name, content)}
        for name, content in files.items()
    ]
    return {"id": match["name"], "sha": commit, "tags": [], "siblings": siblings}


def _blob(content: bytes) -> str:
    """The id that git gives a file."""
    head = b"blob %d\0" % len(content)
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def _large(name: str, content: bytes) -> dict[str, Any]:
    if not name.endswith(".safetensors"):
        return {}
    sha256 = hashlib.sha256(content).hexdigest()
    return {"lfs": {"sha256": sha256, "size": len(content), "pointerSize": 130}}


FETCH = """
import logging, sys
from engine.errors import ConfigError
from engine.text.hub import fetch
logging.basicConfig(level="INFO")
name, revision, weights = sys.argv[1:]
try:
    found = fetch(name, revision=revision or None, weights=weights == "True")
except ConfigError as error:
    sys.exit(f"refused: {error.message}")
print(found.commit, found.folder)
"""


def run_fetch(
    environment: Mapping[str, str], name: str, revision: str = "", *, weights: bool = True
) -> subprocess.CompletedProcess[str]:
    """`engine.text.hub.fetch` in a process of its own, as the environment is read at its start."""
    return subprocess.run(
        [sys.executable, "-c", FETCH, name, revision, str(weights)],
        cwd=ROOT,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

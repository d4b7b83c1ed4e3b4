"""Reads the files of a repository on a hub, which names its weights by their SHA-256."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from engine.errors import ConfigError
from engine.model_cache.remote_files import Checksum, RemoteFile, SourceAway
from engine.model_cache.sources import ModelSource
from engine.text.hub import hub_errors_explained
from engine.text.hub_weights import PIECE_BYTES, SHA256

GIT_ID = re.compile(r"[0-9a-f]{40}")


class HubAccess(NamedTuple):
    """How a hub is reached. What is None is as the hub's library finds it in the environment."""

    endpoint: str | None = None
    token: str | None = None

    def __repr__(self) -> str:
        return f"HubAccess(endpoint={self.endpoint!r})"


class HubFiles:
    """A repository at one commit. `revision`: in place of the source's."""

    def __init__(self, source: ModelSource, access: HubAccess, revision: str | None) -> None:
        """Ask the hub for the commit and its files. Raises: ConfigError."""
        from huggingface_hub import HfApi

        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it would log every request
        self.source, self._access = source, access
        revision = revision or source.place or None
        api = HfApi(endpoint=access.endpoint, token=access.token)
        self._endpoint = api.endpoint
        with hub_errors_explained(source.name, revision, hub=self._endpoint):
            info = api.model_info(source.name, revision=revision, files_metadata=True)
        if info.sha is None:
            raise ConfigError(f"{source}: {self._endpoint} names no commit of it")
        self.state = info.sha
        self.files: Mapping[str, RemoteFile] = {
            each.rfilename: RemoteFile(
                each.size or 0, _checksum(each.lfs.sha256 if each.lfs else None, each.blob_id)
            )
            for each in info.siblings or ()
        }

    def read(self, name: str, start: int) -> Iterator[bytes]:
        """Raises: SourceAway, ConfigError."""
        import httpx2
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it exports them by a star
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.source.name, name, revision=self.state, endpoint=self._endpoint)
        headers = {**build_hf_headers(token=self._access.token), "accept-encoding": "identity"}
        if start:
            headers["range"] = f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        try:
            with (
                hub_errors_explained(self.source.name, self.state, hub=self._endpoint),
                get_session().stream("GET", url, headers=headers, timeout=timeout) as answer,
            ):
                if answer.status_code == httpx2.codes.TOO_MANY_REQUESTS or (
                    answer.status_code >= httpx2.codes.INTERNAL_SERVER_ERROR
                ):
                    raise SourceAway(f"{self._endpoint} answers with {answer.status_code}")
                hf_raise_for_status(answer)
                # One that knows no ranges sends all of it.
                skipped = start if answer.status_code != httpx2.codes.PARTIAL_CONTENT else 0
                for piece in answer.iter_bytes(PIECE_BYTES):
                    if skipped < len(piece):
                        yield piece[skipped:] if skipped else piece
                    skipped = max(0, skipped - len(piece))
        except ConfigError as error:
            if isinstance(error.__cause__, httpx2.TransportError):
                raise SourceAway(error.message) from error
            raise


def _checksum(sha256: str | None, blob_id: str | None) -> Checksum | None:
    if sha256 is not None and SHA256.fullmatch(sha256):
        return Checksum("sha256", sha256)
    if blob_id is not None and GIT_ID.fullmatch(blob_id):
        return Checksum("git", blob_id)
    return None

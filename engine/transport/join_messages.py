"""The closed list of what an engine that joins a gateway and that gateway's home say to each other,
in frames over TLS (`engine.transport.frames`); and the token that lets an engine join.

The first frame of a connection is an `Introduction`, an `Attachment` or a `FileRequest`. What
follows an attachment is the engine's protocol (`engine.protocol`), or requests for files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from engine.model_cache.listings import ModelListing, Sha256
from engine.options import EngineOptions
from engine.protocol import EngineRole
from engine.transport.frames import encode_frame

JOIN_VERSION = 1
HOME_NAME = "home.tollgate"
"""The name in the certificate of every home: an engine knows it by who signed that, not by where it
is."""
ENGINE_NAME = "engine.tollgate"
"""The name in the certificate of every engine that joined, by which others that did know it."""
BEAT_S = 5.0
"""How often each side of an introduced connection is heard of at least."""
SILENT_S = 20.0
"""An end of which nothing was heard for so long is lost."""
MODEL, ADAPTER = "model", "adapter "
"""The names of folders: the model's, and, before its own name, an adapter's."""
TOKEN_PREFIX = "tgjoin_"
MAX_TOKEN_CHARS = 8192
MAX_RANGE_BYTES = 64 << 20
"""So much of a file is sent at a time, so that all who fetch come to their turn."""

Names = dict[str, str]


class JoinToken(msgspec.Struct, frozen=True, kw_only=True):
    """Lets an engine of one model join one home, until it expires."""

    version: int = JOIN_VERSION
    id: str
    secret: str
    model: str
    expires_at: int
    """Unix seconds, by the home's clock."""
    authority: bytes
    """The certificate (DER) of the home's authority: it signs the home's own, and the engine's."""

    def to_text(self) -> str:
        packed = base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()
        return TOKEN_PREFIX + packed.rstrip("=")

    @classmethod
    def of_text(cls, text: str) -> JoinToken:
        """Raises: ConfigError, which quotes nothing of it."""
        packed = text.strip().removeprefix(TOKEN_PREFIX)
        try:
            if len(text) > MAX_TOKEN_CHARS or not text.strip().startswith(TOKEN_PREFIX):
                raise ValueError
            raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
            token = msgspec.msgpack.decode(raw, type=cls)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise ConfigError(
                "not a token to join with: `tollgate fleet token create` makes one"
            ) from None
        if token.version != JOIN_VERSION:
            raise ConfigError(
                f"a token of version {token.version}; this engine reads {JOIN_VERSION}"
            )
        return token


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Says what an engine is, as far as it has to be the same in all replicas of a model."""

    protocol_version: int
    model: str
    files: Names
    """The hash of each of the model's files, by its place (`engine.model_files`)."""
    options: Names
    """Those options that change what the model says, by name."""
    listings: dict[str, ModelListing] = {}
    """The files that it sends to other engines of the model, from the cache of its machine, by the
    name of their folder, as in `files`."""
    role: EngineRole = "both"


# engine -> home


class Introduction(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="introduction"):
    """Asks to be a replica. The home answers with an `Admission` or a `AdmissionRefusal`."""

    version: int = JOIN_VERSION
    identity: EngineIdentity
    host: str
    """The name of its machine, for people."""
    clock: float
    """Its Unix seconds."""
    token_id: str = ""
    secret: str = ""
    """The token's; with a certificate it needs none."""
    request: bytes = b""
    """A certificate signing request (DER): it has no certificate yet, or a fresh one is due."""
    is_ready: bool
    """False: it has not loaded its weights, and only asks whether it would be admitted."""
    wants_files: bool = False
    """It has none of the model's files yet, and asks what there is of them (`ModelOffer`)."""


class Attachment(msgspec.Struct, frozen=True, tag_field="t", tag="attachment"):
    """Answers an `ConnectionRequest`: this connection is the one that was asked for."""

    connection_id: str


class FileRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="file"):
    """Asks for `size` bytes of a file from `start` on. The answer is a `FileRange`, which the bytes
    follow, or a `FileRefusal`; then comes the next request. The home asks engines the same."""

    sha256: Sha256
    start: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=1, le=MAX_RANGE_BYTES)]


class Departure(msgspec.Struct, frozen=True, tag_field="t", tag="departure"):
    """The engine drains: nothing new is to come to it, what is there stays until it is done."""


class Beat(msgspec.Struct, frozen=True, tag_field="t", tag="beat"):
    """A sign of life, of either side."""


# home -> engine


class ModelOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Says where an engine that has none of its model's files finds them. All by the name of the
    folder: `model`, `adapter NAME`."""

    model: str
    listings: dict[str, ModelListing]
    """The files that this home, or an engine that joined it, sends."""
    sources: Names
    """The sources, `hf:...` or `s3://...`, that its settings name."""


class Admission(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="admission"):
    """It is a replica now, or would be. Requests come by connections that are asked for."""

    replica: str
    certificate: bytes = b""
    """The one that was asked for by a `request` (PEM)."""
    offer: ModelOffer | None = None
    """To one that `wants_files`."""


class AdmissionRefusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="refusal"):
    """The reason, a line for people. `is_final`: to ask again is of no use. `is_unknown`: by this
    certificate, which is not or no longer known."""

    reason: str
    is_final: bool
    is_unknown: bool = False


class ConnectionRequest(msgspec.Struct, frozen=True, tag_field="t", tag="opening"):
    """A gateway process wants the engine: dial once more, and begin with this `Attachment`.
    `for_files`: another engine wants files of the model, for which `FileRequest`s come."""

    connection_id: str
    for_files: bool = False


class FileRange(msgspec.Struct, frozen=True, tag_field="t", tag="range"):
    """So many bytes follow this frame."""

    size: int


class FileRefusal(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag="no-file"):
    """The reason, a line for people. `is_final`: to ask again is of no use."""

    reason: str
    is_final: bool


FromEngine = Introduction | Attachment | Departure | Beat | FileRequest
FromHome = Admission | AdmissionRefusal | ConnectionRequest | Beat
FileAnswer = FileRange | FileRefusal


def options_of(given: EngineOptions) -> Names:
    """Return what options of an engine, as configured, change what its model says."""
    names = ["quantization", "dtype", "kv_cache_dtype", "load_format"]
    if given.load_format == "dummy":  # the weights are drawn by it
        names.append("seed")
    return {name: str(getattr(given, name)) for name in names}


async def beat(writer: asyncio.StreamWriter) -> None:
    """Give signs of life until the connection is lost, or this is cancelled."""
    with contextlib.suppress(OSError):
        while not writer.is_closing():
            writer.write(encode_frame(Beat()))
            await writer.drain()
            await asyncio.sleep(BEAT_S)

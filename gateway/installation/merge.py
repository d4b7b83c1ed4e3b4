"""Merges settings that operators made by API with those of the file: a name of the file hides the
same name of theirs.

They pass the same converters as the file, so that an error names the same field. What would let the
holder of an operator's key reach into the machine or take a secret from it stands in the file
alone: paths, and an upstream's key for another place than the file shows it to. Price books are
added to those of the file, whose entries hide the same ones. A program that a
person added at the machine is sealed under the installation's secret, which neither an operator's
key nor Postgres gives, for the one home that runs it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar, get_args

import msgspec
from cryptography.exceptions import InvalidTag

from billing.errors import PriceBookError
from billing.pricing.price_book import PriceBook
from gateway.home import Home
from gateway.lanes import DeadlineS, LaneDeadlines
from gateway.secret import Cipher, Secret, UnknownSecret
from gateway.settings.changes import PRIVATE_PART, changes_between
from gateway.settings.file import (
    SettingsError,
    WrittenMcpServer,
    WrittenModel,
    decode_path,
    explain,
)
from gateway.settings.load import LANES, Settings
from gateway.settings.mcp_servers import check_mcp_servers
from gateway.settings.models import ModelConfig, check_parts, to_models
from gateway.settings.sealed_keys import (
    PURPOSE,
    KeyContent,
    SealedKey,
    context_of,
    origin_of,
    origins_of,
)

T = TypeVar("T")
Kind = Literal["model", "mcp_server", "price_book", "deadlines"]
KINDS: tuple[Kind, ...] = get_args(Kind)
FileNames = Mapping[Kind, Collection[str]]
"""The names that the file takes, of each kind."""
OF_THE_FILE: Mapping[Kind, tuple[str, ...]] = {
    "model": (
        *("path", "engine", "insecure", "replicas", "joined", "engine_options", "adapter"),
        *("chat_template", "tokenizer", "api_key_file"),
    ),
    "mcp_server": ("command", "args", "environment", "digests", "readable", "oauth"),
}
"""Fields that name programs, files and secrets of the machine."""
IN_FILE_ALONE = "stands in the settings file alone: it names what is of the gateway's machine"
POSITION = re.compile(r"\b(?:model|mcp\.servers)\[(\d+)\]")
MAX_SERVERS = 64
USUAL_DEADLINES = LaneDeadlines()
"""The deadlines where nobody gives any."""


class StoredSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A model or MCP server, whose `content` is its table as in the file, without the name; a price
    book with the tables of one; or the deadline of the lane that is its name."""

    kind: Kind
    name: str
    content: dict[str, Any]
    home: str | None = None
    """The home that it is for, of a program; None: for all."""
    sealed: bytes | None = None
    """An upstream's key, or of a program what shows that a person of its home added it."""
    secret_id: str | None = None
    version: int = 1
    created_at: datetime | None = None
    updated_at: datetime | None = None


class WrittenDeadline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a stored deadline. `seconds`: to the first token; None: as it comes."""

    seconds: DeadlineS | None


class Merger:
    """Merges for one home. `secret`: of the installation, which has sealed what is sealed."""

    def __init__(self, home: str, secret: Secret) -> None:
        self.home = home
        self._cipher = Cipher(secret, PURPOSE)

    def merged(
        self, settings: Settings, stored: Sequence[StoredSetting], taken: FileNames
    ) -> Settings:
        """Return `settings`, those of the file, and what is stored for this home and not hidden
        behind them. `taken`: the names that the file takes. Raises: SettingsError."""
        here = [each for each in stored if each.home in (None, self.home)]
        seen = [each for each in here if each.name not in taken.get(each.kind, ())]
        models = settings.models + tuple(_to_model(each, settings) for each in _of("model", seen))
        check_parts(models, settings.workers)
        added = [self._to_server(each) for each in _of("mcp_server", seen)]
        servers = [*settings.mcp.servers, *added]
        if len(servers) > MAX_SERVERS:
            raise SettingsError(f"mcp_server: there may be {MAX_SERVERS}, with those of the file")
        try:
            check_mcp_servers(
                servers,
                [model.name for model in models],
                near=settings.egress_to_loopback,
                drift=settings.mcp.stdio.unpinned == "warn",
            )
        except SettingsError as error:
            raise SettingsError(_by_name(str(error), [each.name for each in servers])) from None
        return msgspec.structs.replace(
            settings,
            models=models,
            mcp=msgspec.structs.replace(settings.mcp, servers=servers),
            stored_prices=dict(map(_to_prices, _of("price_book", seen))),
            deadlines=msgspec.structs.replace(
                settings.deadlines, **dict(map(_to_deadline, _of("deadlines", seen)))
            ),
        )

    def with_key(self, item: StoredSetting, api_key: str) -> StoredSetting:
        """Return a model with its upstreams' key."""
        key = KeyContent(api_key=api_key, origins=upstreams_of(item.content))
        return self._seal(item, msgspec.json.encode(key))

    def as_program(self, item: StoredSetting) -> StoredSetting:
        """Return a program as a person of this home adds it."""
        bound = msgspec.structs.replace(item, home=self.home)
        return self._seal(bound, _program(bound))

    def has_key_for(self, item: StoredSetting, content: dict[str, Any]) -> bool:
        """Tell whether the key of a model is for the upstreams of another content, too."""
        try:
            key = msgspec.json.decode(self._open(item), type=KeyContent)
        except msgspec.MsgspecError:
            return False
        return set(upstreams_of(content)) <= set(key.origins)

    def _seal(self, item: StoredSetting, plain: bytes) -> StoredSetting:
        sealed = self._cipher.seal(plain, context_of(item.kind, item.name))
        return msgspec.structs.replace(item, sealed=sealed.data, secret_id=sealed.secret_id)

    def _open(self, item: StoredSetting) -> bytes:
        """Return what is under the seal; nothing, where there is none that opens."""
        if item.sealed is None or item.secret_id is None:
            return b""
        try:
            return self._cipher.open(item.sealed, context_of(item.kind, item.name), item.secret_id)
        except (UnknownSecret, InvalidTag):
            return b""

    def _to_server(self, stored: StoredSetting) -> WrittenMcpServer:
        if stored.home is None:
            return _to_remote_server(stored)
        if self._open(stored) != _program(stored):
            raise SettingsError(
                f"mcp_server.{stored.name}: no person of this home has added this program"
            )
        return _convert(stored, WrittenMcpServer)


def file_names(settings: Settings) -> dict[Kind, list[str]]:
    """Return the names that the file of `settings` takes; adapters are models, too. Of price books
    it takes none: their entries are hidden one by one."""
    return {
        "model": list(settings.model_names),
        "mcp_server": [each.name for each in settings.mcp.servers],
        "deadlines": list(settings.file_lanes),
    }


def upstreams_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return scheme, host and port of the upstreams in a model's table, which may be wrong."""
    replicas = content.get("replica")
    tables = [content, *(replicas if isinstance(replicas, list) else ())]
    urls = [each.get("upstream") for each in tables if isinstance(each, dict)]
    return origins_of(each for each in urls if isinstance(each, str))


def _program(stored: StoredSetting) -> bytes:
    return msgspec.json.encode([stored.home, stored.content], order="deterministic")


def without(settings: Settings, stored: Sequence[StoredSetting], taken: FileNames) -> Settings:
    """Return `settings`, which may be merged ones, without what is stored; `taken`: the names that
    the file takes, which stay."""
    gone = {(each.kind, each.name) for each in stored if each.name not in taken.get(each.kind, ())}
    servers = [each for each in settings.mcp.servers if ("mcp_server", each.name) not in gone]
    usual = {lane: getattr(USUAL_DEADLINES, lane) for kind, lane in gone if kind == "deadlines"}
    return msgspec.structs.replace(
        settings,
        models=tuple(each for each in settings.models if ("model", each.name) not in gone),
        mcp=msgspec.structs.replace(settings.mcp, servers=servers),
        stored_prices={},
        deadlines=msgspec.structs.replace(settings.deadlines, **usual),
    )


class ChangeCheck:
    """Checks what would be stored with all settings in force, and keeps the lines of a diff.
    `settings`: those in force, with what is stored."""

    def __init__(self, settings: Settings, merger: Merger) -> None:
        self._settings, self._merger = settings, merger
        self.wanted = settings
        """The settings that would be in force."""
        self.lines: list[str] = []

    def check(
        self, stored: Sequence[StoredSetting], wanted: Sequence[StoredSetting], taken: FileNames
    ) -> None:
        """Check what is `wanted` in the place of what is `stored`. Raises: SettingsError."""
        self.wanted = self._merger.merged(without(self._settings, stored, taken), wanted, taken)
        self.lines = [str(each) for each in changes_between(self._settings, self.wanted)]


def _of(kind: Kind, items: Sequence[StoredSetting]) -> Iterator[StoredSetting]:
    return (each for each in items if each.kind == kind)


def _to_prices(stored: StoredSetting) -> tuple[str, dict[str, Any]]:
    """Check a price book by itself, and return its tables by its name. Raises: SettingsError."""
    try:
        PriceBook.of_tables(stored.content, f"price_book.{stored.name}")
    except PriceBookError as error:
        raise SettingsError(str(error)) from None
    return stored.name, stored.content


def _to_deadline(stored: StoredSetting) -> tuple[str, float | None]:
    """Raises: SettingsError."""
    at = f"deadlines.{stored.name}"
    if stored.name not in LANES:
        raise SettingsError(f"{at}: no lane; there are {', '.join(LANES)}")
    try:
        return stored.name, msgspec.convert(stored.content, WrittenDeadline).seconds
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, at)) from None


def _to_model(stored: StoredSetting, settings: Settings) -> ModelConfig:
    _refuse_what_is_of_the_file(stored)
    written = _convert(stored, WrittenModel)
    at = f"model.{stored.name}"
    try:
        (model,) = to_models([written], {}, Home(settings.home))
    except SettingsError as error:
        raise SettingsError(_by_name(str(error), [stored.name])) from None
    shown = {
        (each.api_key_env, origin_of(each.upstream))
        for configured in settings.models
        for each in configured.replicas
    }
    for each in model.replicas:
        _refuse_private(each.upstream, f"{at}.upstream")
        if each.api_key_file is not None:
            raise SettingsError(f"{at}.api_key_file: {IN_FILE_ALONE}")
        variable = each.api_key_env
        if variable is not None and (variable, origin_of(each.upstream)) not in shown:
            raise SettingsError(
                f"{at}.api_key_env: the settings file shows {variable} to no upstream at"
                f" {origin_of(each.upstream)}, so only the file can do so"
            )
    return model if stored.sealed is None else _with_sealed_key(model, stored, at)


def _with_sealed_key(model: ModelConfig, stored: StoredSetting, at: str) -> ModelConfig:
    """Return a model whose upstreams get the key that was given with it."""
    assert stored.sealed is not None and stored.secret_id is not None
    if any(each.api_key_env is not None for each in model.replicas):
        raise SettingsError(f"{at}.api_key_env: its key was given with it")
    data = base64.b64encode(stored.sealed).decode()
    key = SealedKey(model=stored.name, secret_id=stored.secret_id, data=data)
    replicas = tuple(msgspec.structs.replace(each, sealed_key=key) for each in model.replicas)
    return msgspec.structs.replace(model, replicas=replicas)


def _to_remote_server(stored: StoredSetting) -> WrittenMcpServer:
    _refuse_what_is_of_the_file(stored)
    server = _convert(stored, WrittenMcpServer)
    at = f"mcp_server.{stored.name}"
    if server.url is None:
        raise SettingsError(f"{at}.url: missing")
    _refuse_private(server.url, f"{at}.url")
    if server.openapi is not None:
        if not server.openapi.startswith(("https://", "http://")):
            raise SettingsError(f"{at}.openapi: a path stands in the settings file alone")
        _refuse_private(server.openapi, f"{at}.openapi")
    return server


def _refuse_what_is_of_the_file(stored: StoredSetting) -> None:
    for field in OF_THE_FILE.get(stored.kind, ()):
        if field in stored.content:
            raise SettingsError(f"{stored.kind}.{stored.name}.{field}: {IN_FILE_ALONE}")


def _convert(stored: StoredSetting, kind: type[T]) -> T:
    at = f"{stored.kind}.{stored.name}"
    if "name" in stored.content:
        raise SettingsError(f"{at}.name: stands beside the content")
    try:
        return msgspec.convert(stored.content | {"name": stored.name}, kind, dec_hook=decode_path)
    except msgspec.ValidationError as error:
        raise SettingsError(explain(error, at)) from None


def _refuse_private(url: str, at: str) -> None:
    if PRIVATE_PART.search(url):
        raise SettingsError(f"{at}: a user, a password or a query stands in the file alone")


def _by_name(message: str, names: Sequence[str]) -> str:
    """Put the names of entries in the place of their positions."""

    def name(found: re.Match[str]) -> str:
        kind = "model" if found[0].startswith("model") else "mcp_server"
        return f"{kind}.{names[int(found[1])]}" if int(found[1]) < len(names) else found[0]

    return POSITION.sub(name, message)

"""/v1/admin/settings: models, MCP servers, price books and the deadlines of lanes that operators
store beside the settings file, in force without a restart. A name of the file hides the same name
here; of price books, an entry of a file the same entry.

`?dry_run=true` checks a change in full and says what it would do, and nothing is stored.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar.handlers import HTTPRouteHandler
from msgspec import UNSET, Meta, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.pricing.entries import KEYS as PRICE_KEYS
from billing.pricing.lists import KINDS as TERM_KINDS
from billing.pricing.lists import TERM_KEYS
from gateway.installation import items as verbs
from gateway.installation.items import HomeState, StoredSettings
from gateway.installation.merge import KINDS, ChangeCheck, Kind, StoredSetting
from gateway.installation.price_changes import take_up_prices
from gateway.routes.shared.access import needs
from gateway.routes.shared.pages import page_of
from gateway.routes.shared.resource import ActingRequest, AdminRequest, AdminResource
from gateway.settings.changes import public
from gateway.settings.file import (
    NAME_PATTERN,
    SettingsError,
    WrittenMcpSampling,
    WrittenMcpServer,
    WrittenModel,
    WrittenReplica,
)
from gateway.settings.load import LANES, MAX_SECRET_BYTES
from gateway.tenancy.changes import unchecked
from gateway.tenancy.errors import InvalidField, ReadOnly
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of

PATH = "/v1/admin/settings"
FIELDS = frozenset(
    name
    for struct in (WrittenModel, WrittenReplica, WrittenMcpServer, WrittenMcpSampling)
    for name in struct.__struct_fields__
) | {*PRICE_KEYS, *TERM_KINDS, *TERM_KEYS, "price", "seconds"}
Act = TypeVar("Act", bound=Callable[..., Any])
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
ApiKey = Annotated[str, Meta(min_length=1, max_length=MAX_SECRET_BYTES, pattern=r"^[!-~]+$")]


class ChangeQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    dry_run: bool = False


class NewSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`content`: the table as in the settings file, without its name."""

    name: Name
    content: dict[str, Any]


class SettingContent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    content: dict[str, Any]


class NewModel(NewSetting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`api_key`: of its upstreams; kept sealed, and never shown again."""

    api_key: ApiKey | None = None


class ModelContent(SettingContent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`api_key`: left out, the key stays, for upstreams at the same places; null takes it away."""

    api_key: ApiKey | None | UnsetType = UNSET


class HomeView(msgspec.Struct, frozen=True, kw_only=True):
    """One running `tollgate up`. `in_force`: it has the newest change in force; `problem`: why it
    has not."""

    home: str
    in_force: bool
    problem: str | None


class StoredSettingView(msgspec.Struct, frozen=True, kw_only=True):
    """`hidden`: a settings file has the same name, which counts there. `home`: the only one that it
    is for, of a program that a person added there. `has_api_key`: one is kept, sealed. `changes`:
    what this change alters in the settings in force, a line each; null: nothing was changed."""

    object: Literal["stored_setting"] = "stored_setting"
    id: str
    kind: str
    content: dict[str, Any]
    home: str | None
    has_api_key: bool
    version: int
    created_at: int | None
    updated_at: int | None
    hidden: bool
    homes: list[HomeView]
    changes: list[str] | None


class DeadlinesView(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, by lane; null: as it comes."""

    interactive: float | None
    agentic: float | None
    batch: float | None


class ModelVersionView(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model in one home. `version`: a digest of its settings. `state`: starting,
    warming, ready, serving, restarting, draining, or failed: then the version before serves, and
    `problem` says why."""

    model: str
    version: str
    weights: str | None
    place: str
    state: str
    since: int
    problem: str | None


class RunningHomeView(HomeView, frozen=True, kw_only=True):
    """`release`: of Tollgate; null: an older one, which does not say it."""

    release: str | None
    models: list[ModelVersionView]


class SettingsView(msgspec.Struct, frozen=True, kw_only=True):
    """`number`: how often stored settings were changed. `deadlines`: those in force in the worker
    that answers."""

    object: Literal["settings"] = "settings"
    number: int
    homes: list[RunningHomeView]
    deadlines: DeadlinesView


def to_view(
    item: StoredSetting, stored: StoredSettings | None = None, changes: list[str] | None = None
) -> StoredSettingView:
    return view_of(
        StoredSettingView,
        item,
        id=item.name,
        content=public(item.content),
        has_api_key=item.sealed is not None and item.home is None,
        hidden=stored is not None and item.name in stored.file_names[item.kind],
        homes=[] if stored is None else to_homes(stored),
        changes=changes,
    )


def to_homes(stored: StoredSettings) -> list[HomeView]:
    return [to_home(each, stored.number) for each in stored.homes]


def to_home(home: HomeState, number: int) -> HomeView:
    is_in_force = home.number == number and not home.problem
    return HomeView(home=home.home, in_force=is_in_force, problem=home.problem or None)


def to_running_home(home: HomeState, number: int) -> RunningHomeView:
    models = [
        ModelVersionView(
            model=each.model,
            version=each.version,
            weights=each.weights or None,
            place=each.place,
            state=each.state,
            since=each.since,
            problem=each.problem or None,
        )
        for each in home.running.models
    ]
    shown = to_home(home, number)
    return RunningHomeView(
        home=shown.home,
        in_force=shown.in_force and not home.is_changing,
        problem=shown.problem,
        release=home.running.release or None,
        models=models,
    )


class StoredChange:
    """One change: its transaction, and what it alters in the settings in force."""

    def __init__(
        self,
        request: ActingRequest,
        query: ChangeQuery,
        kind: Kind,
        check: Callable[[Any], None] = unchecked,
    ) -> None:
        """`check`: of the view that is changed, for If-Match. Raises: ReadOnly."""
        self._is_of_prices = kind == "price_book"
        configuration = request.services.configuration
        if configuration is None:
            raise ReadOnly("settings", "this gateway takes up no other settings")
        self._request, self._query, self._check_view = request, query, check
        self.merger = configuration.merger
        self._change_check = ChangeCheck(configuration.settings, self.merger)
        self._settings = configuration.settings
        self._stored: StoredSettings | None = None
        self._wanted: Sequence[StoredSetting] = ()
        self._lines: list[str] | None = None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        async with self._request.system_db.connect() as conn, conn.begin() as transaction:
            yield conn
            if self._is_of_prices:
                before = () if self._stored is None else self._stored.items
                books = map(prices_in, (before, self._wanted))
                self._lines = await take_up_prices(conn, self._settings, *books)
            if self._query.dry_run:
                await transaction.rollback()

    @property
    def arguments(self) -> dict[str, Any]:
        request = self._request
        return {
            "check_all": self._check_all,
            "operator_org": request.org_id,
            "actor": request.actor,
        }

    def check(self, item: StoredSetting) -> None:
        """Raises: PreconditionFailed."""
        self._check_view(to_view(item))

    def view(self, item: StoredSetting) -> StoredSettingView:
        lines = self._change_check.lines if self._lines is None else self._lines
        return to_view(item, self._stored, lines)

    def made(self, kind: Kind, wanted: NewSetting) -> StoredSetting:
        item = StoredSetting(kind=kind, name=wanted.name, content=wanted.content)
        key = wanted.api_key if isinstance(wanted, NewModel) else None
        return item if key is None else self.merger.with_key(item, key)

    def changed(self, item: StoredSetting, wanted: SettingContent) -> StoredSetting:
        """Raises: InvalidField, ReadOnly."""
        if item.home is not None:
            raise ReadOnly("name", "it runs a program, and is changed at the machine of its home")
        changed = msgspec.structs.replace(item, content=wanted.content)
        key = wanted.api_key if isinstance(wanted, ModelContent) else UNSET
        if key is None:
            return msgspec.structs.replace(changed, sealed=None, secret_id=None)
        if key is not UNSET:
            return self.merger.with_key(changed, key)
        if item.sealed is not None and not self.merger.has_key_for(item, wanted.content):
            raise InvalidField("api_key", "give it again: an upstream is at another place")
        return changed

    def _check_all(self, stored: StoredSettings, wanted: Sequence[StoredSetting]) -> None:
        """Raises: InvalidField."""
        self._stored, self._wanted = stored, wanted
        try:
            self._change_check.check(stored.items, wanted, stored.file_names)
        except SettingsError as error:
            raise _invalid(str(error), wanted) from None


def _invalid(message: str, wanted: Sequence[StoredSetting]) -> InvalidField:
    """Make the error of settings that do not fit. Its detail repeats nothing of what is stored or
    wanted; `param` names the field."""
    place, _, reason = message.partition(": ")
    found = re.fullmatch(rf"(?:{'|'.join(KINDS)})\.(?:.*\.)?(\w+)", place)
    texts = {text for each in wanted for text in (each.name, *texts_in(each.content))}
    is_constant = reason and not any(text in reason for text in texts if len(text) > 1)
    return InvalidField(
        "content" if found is None else f"content.{found[1]}",
        message,
        detail=reason if is_constant else "It does not fit the other settings",
    )


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, as they stand and as they are shown; but no known field."""
    match value:
        case str():
            yield from {value, repr(value)[1:-1]}
        case dict():
            for key, inner in value.items():
                yield from () if key in FIELDS else texts_in(key)
                yield from texts_in(inner)
        case list():
            for each in value:
                yield from texts_in(each)


def routes_of(
    kind: Kind,
    part: str,
    scope: str,
    *,
    new: type[NewSetting] = NewSetting,
    content: type[SettingContent] = SettingContent,
    only_adds: bool = False,
) -> list[HTTPRouteHandler]:
    """Make the routes of one kind at `PATH`/`part`. `new` and `content`: the bodies. `only_adds`:
    what is stored of it is there for good."""
    found = AdminResource[StoredSettingView](
        path=f"{PATH}/{part}",
        tag="Settings",
        read=needs(scope),
        change=needs(scope),
        view=StoredSettingView,
        unsteady=("hidden", "homes", "changes"),
        in_system=True,
        checks_ids=False,
    )
    one = found.path + "/{name:path}"

    async def create(
        request: AdminRequest, query: ChangeQuery, wanted: NewSetting
    ) -> StoredSettingView:
        change = StoredChange(request, query, kind, request.check)
        async with change.transaction() as conn:
            made = await verbs.create_item(conn, change.made(kind, wanted), **change.arguments)
        return change.view(made)

    async def replace(
        request: AdminRequest, query: ChangeQuery, wanted: SettingContent
    ) -> StoredSettingView:
        change, name = StoredChange(request, query, kind, request.check), name_of(request)
        async with change.transaction() as conn:
            made = await verbs.replace_item(
                conn,
                kind,
                name,
                lambda item: change.changed(item, wanted),
                check=change.check,
                **change.arguments,
            )
        return change.view(made)

    async def remove(request: AdminRequest, query: ChangeQuery) -> StoredSettingView:
        change, name = StoredChange(request, query, kind, request.check), name_of(request)
        async with change.transaction() as conn:
            gone = await verbs.remove_item(conn, kind, name, check=change.check, **change.arguments)
        return change.view(gone)

    asked: dict[str, Any] = {"query": ChangeQuery}
    add = found.route("POST", found.path, "Add one", body=new, status=201, **asked)
    put = found.route("PUT", one, "Replace one", body=content, conditional=True, **asked)
    delete = found.route("DELETE", one, "Remove one", conditional=True, **asked)
    adding = [*reading_routes(found, one, kind), add(named(create, kind))]
    changing = [] if only_adds else [put(named(replace, kind)), delete(named(remove, kind))]
    return adding + changing


def reading_routes(
    found: AdminResource[StoredSettingView], one: str, kind: Kind
) -> list[HTTPRouteHandler]:
    async def list_(request: AdminRequest, query: PageQuery) -> tuple[list[Any], bool]:
        stored = await read(request)
        known = {each.name: each for each in stored.items if each.kind == kind}
        names, more = page_of(known, query)
        return [to_view(known[name], stored) for name in names], more

    async def retrieve(request: AdminRequest) -> StoredSettingView:
        stored = await read(request)
        return to_view(verbs.find_item(stored, kind, name_of(request)), stored)

    page = found.page("What is stored beside the settings file, by name", PageQuery)
    get = found.get("One of them", path=one)
    return [page(named(list_, kind)), get(named(retrieve, kind))]


async def read(request: AdminRequest) -> StoredSettings:
    async with request.reading() as conn:
        return await verbs.read_stored(conn)


def named(act: Act, kind: Kind) -> Act:
    """Return a handler under the name of its own that the API's document needs."""
    act.__name__ = act.__qualname__ = f"{act.__name__.rstrip('_')}_stored_{kind}"
    return act


def name_of(request: AdminRequest) -> str:
    return request.id.removeprefix("/")


state = AdminResource[SettingsView](
    path=PATH,
    tag="Settings",
    read=needs("operator:models"),
    view=SettingsView,
    in_system=True,
)


@state.get("Where stored settings are in force")
async def retrieve_settings(request: AdminRequest) -> SettingsView:
    stored = await read(request)
    deadlines = request.services.generation.deadlines
    return SettingsView(
        number=stored.number,
        homes=[to_running_home(each, stored.number) for each in stored.homes],
        deadlines=DeadlinesView(**{lane: getattr(deadlines, lane) for lane in LANES}),
    )


def prices_in(items: Sequence[StoredSetting]) -> dict[str, Any]:
    """Return the tables of the price books among stored settings, by name."""
    return {each.name: each.content for each in items if each.kind == "price_book"}


routes = [
    retrieve_settings,
    *routes_of("model", "models", "operator:models", new=NewModel, content=ModelContent),
    *routes_of("mcp_server", "mcp_servers", "operator:servers"),
    *routes_of("price_book", "price_books", "operator:prices", only_adds=True),
    *routes_of("deadlines", "deadlines", "operator:models"),
]

"""Keeps what serves the models of one worker: routes, clients of engines and waiting rooms.

Other settings replace what they change, beside the old: whoever uses a replica goes on with it, and
it is closed when nobody does. What stays the same stays the same object, with its connections, its
breaker and its counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from engine.errors import EngineUnavailable
from engine.transport.client import EngineClient
from foundation.retirement import Retirement
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import OnAsked
from gateway.fleet.engine_view import EngineView
from gateway.fleet.joining.round_trips import RoundTrips
from gateway.fleet.joining.tokens import JoinTokens
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.predicted_time import ModelCosts
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Fleet, Route
from gateway.fleet.sent_work import AskedWork, SentWork
from gateway.fleet.upstream.routes import Rooms, upstream_route
from gateway.fleet.waiting_room import WaitingRoom
from gateway.home import Home
from gateway.settings.load import Settings
from gateway.settings.models import ModelConfig

log = logging.getLogger(__name__)

START_WAIT_S = 10.0
"""How long a start waits for the engines."""
SWAP_WAIT_S = 1.0
"""How long new settings wait for an engine: whoever starts one says so once it is ready."""

Connect = Callable[[str, str], EngineClient]
"""Makes the client of a model's engine, by the model's name and the engine's address."""
Close = Callable[[], Awaitable[None]]
Stamp = tuple[int, int, int]
EngineKey = tuple[str, str]
"""The name of the base model, and the engine's address."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the settings with its adapters, and what serves them."""

    settings: Settings
    """Those of which it was made."""
    model: ModelConfig
    routes: tuple[Route, ...]
    clients: tuple[EngineClient, ...] = ()
    """The clients of its engines, in their order; an upstream has none."""
    stamps: tuple[Stamp | None, ...]
    """Those of its files, taken before they were read."""

    def is_as_in(self, settings: Settings, model: ModelConfig) -> bool:
        """Tell whether other settings would make the same of it."""
        before, now = (what_makes(each) for each in (self.settings, settings))
        return self.model == model and before == now and self.stamps == stamps_of(model)


def stamps_of(model: ModelConfig) -> tuple[Stamp | None, ...]:
    """Return what tells whether the small files of a model are those that were read: the keys of
    upstreams and a chat template, which change in place."""
    keys = (each.api_key_file for each in model.replicas)
    return tuple(stamp_of(path) for path in (*keys, model.chat_template))


def stamp_of(path: Path | None) -> Stamp | None:
    """Return a file's inode, time and size; None: there is none."""
    try:
        found = None if path is None else path.stat()
    except OSError:
        return None
    return None if found is None else (found.st_ino, found.st_mtime_ns, found.st_size)


def what_makes(settings: Settings) -> tuple[object, ...]:
    """Return what the routes of all models are made of, beside their own settings."""
    compat = settings.compat
    claims = settings.max_disputed_in_a_row, settings.disputed_rest_s
    return compat.unknown_fields, compat.dialect, claims


class ServedModels:
    """The models of one worker. `connect` starts no client. `on_asked`: hears what engines are
    asked to keep. `marks`: of engines that get nothing new. `index`: of which engine has what
    cached. `fetches`: engines of a model read prefixes of each other. `borrow`: as `connect`, for
    engines that other cells lend."""

    def __init__(
        self,
        connect: Connect,
        threads: PrepareThreads,
        on_asked: OnAsked,
        marks: DrainMarks,
        index: KvIndex,
        *,
        fetches: bool = True,
        borrow: Connect | None = None,
    ) -> None:
        self.fleet = Fleet((), fetches=fetches)
        self.engines: dict[str, Mapping[str, EngineClient]] = {}
        """By model name and by the replica's name, as of now."""
        self.rooms: dict[str, Sequence[WaitingRoom]] = {}
        """By model name, as of now."""
        self._connect, self._threads, self._on_asked = connect, threads, on_asked
        self._borrow = borrow or connect
        self.drain_marks = marks
        self.index = index
        self._served: dict[str, ServedModel] = {}
        self._clients: dict[EngineKey, EngineClient] = {}
        self._views: dict[EngineKey, EngineView] = {}
        self._costs: WeakValueDictionary[str, ModelCosts] = WeakValueDictionary()
        """The costs of steps, by the kind of engines; the views of such engines hold them."""
        self._uses: dict[EngineKey, int] = {}
        self._own_rooms = Rooms()
        self._round_trips: RoundTrips | None = None
        self._asked: dict[str, AskedWork] = {}
        """By the name of each model whose engines a planner counts, as long as this worker runs."""
        self._retirement = Retirement()
        self.on_retired: Callable[[], None] = lambda: None
        """Called when something that was replaced is closed."""

    @property
    def joinable(self) -> frozenset[str]:
        """Return the models that engines of other machines may join now."""
        return frozenset(each.name for each in self.configured if each.joined)

    @property
    def lending_cells(self) -> frozenset[str]:
        """Return the other cells that may lend engines to this one now."""
        return frozenset(one.cell for each in self.configured for one in each.borrowed)

    def join_tokens(self, home: Home) -> JoinTokens:
        """Return the tokens of a home, for what may join it now."""
        return JoinTokens(
            home.join,
            lambda: self.joinable,
            lambda: self.lending_cells,
            lambda: [each.model for each in self.fleet.routes],
        )

    @property
    def configured(self) -> list[ModelConfig]:
        """Return the models that are served now."""
        return [each.model for each in self._served.values()]

    @property
    def clients(self) -> dict[str, EngineClient]:
        """Return the engines that this worker uses, by address: also those that were replaced and
        still run something."""
        return {address: client for (_, address), client in self._clients.items()}

    async def prepare(self, settings: Settings, *, wait_s: float) -> dict[str, ServedModel]:
        """Make what other settings want beside what there is; nothing changes yet. `swap` or
        `discard` takes it. Raises: SettingsError, ConfigError, OSError, ValueError."""
        wanted: dict[str, ServedModel] = {}
        try:
            for model in settings.models:
                known = self._served.get(model.name)
                if known is None or not known.is_as_in(settings, model):
                    known = await self._make(settings, model)
                wanted[model.name] = known
        except BaseException:
            await self.discard(wanted)
            raise
        fresh = [client for each in self._fresh(wanted) for client in expected(each)]
        await await_engines(fresh, wait_s)
        return wanted

    def swap(self, wanted: Mapping[str, ServedModel]) -> None:
        """Serve what was prepared from now on, without an await."""
        old, self._served = self._served, dict(wanted)
        self.fleet.replace(route for each in wanted.values() for route in each.routes)
        self.engines.clear()
        self.engines.update({n: engines_of(e) for n, e in wanted.items() if e.clients})
        self.rooms.clear()
        self.rooms.update({r.model: r.rooms for r in self.fleet.routes if r.rooms})
        for name, each in old.items():
            if wanted.get(name) is not each:
                self._retire(each)

    async def discard(self, wanted: Mapping[str, ServedModel]) -> None:
        """Close what was prepared and is not wanted any more."""
        for each in self._fresh(wanted):
            await self._close(each.settings, each.model, _closing(each))

    async def close(self) -> None:
        """Close all replicas at once, then what they share."""
        await asyncio.gather(self.fleet.close(), self._retirement.close())
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients.clear()
        for view in self._views.values():
            view.close()
        self._views.clear()
        for asked in self._asked.values():
            asked.close()
        self._asked.clear()
        self._own_rooms.close()
        if self._round_trips is not None:
            self._round_trips.close()
            self._round_trips = None

    def _fresh(self, wanted: Mapping[str, ServedModel]) -> Iterable[ServedModel]:
        return [each for name, each in wanted.items() if self._served.get(name) is not each]

    async def _make(self, settings: Settings, model: ModelConfig) -> ServedModel:
        clients, stamps = self._take_clients(model, settings), stamps_of(model)
        rooms = self._own_rooms.take(model, settings)
        make = partial(
            routes_of,
            model,
            settings,
            clients,
            rooms,
            threads=self._threads,
            on_asked=self._on_asked,
            marks=self.drain_marks,
            index=self.index,
            views=[self._views[model.name, address] for address in model.asked_engines],
            round_trips=self._round_trips_of(model, Home(settings.home)),
        )
        asked = self._asked_of(model, Home(settings.home))
        try:
            made = await asyncio.to_thread(make)
            sleep = {"is_asleep": model.is_asleep, "wakes_in_s": model.wakes_in_s}
            routes = tuple(msgspec.structs.replace(each, asked=asked, **sleep) for each in made)
            for replica in (each for route in routes for each in route.replicas):
                await replica.start()
        except BaseException:
            await self._close(settings, model, ())
            raise
        return ServedModel(
            settings=settings, model=model, routes=routes, clients=clients, stamps=stamps
        )

    def _round_trips_of(self, model: ModelConfig, home: Home) -> RoundTrips | None:
        if model.borrowed and self._round_trips is None:
            self._round_trips = RoundTrips(home.round_trips)
        return self._round_trips

    def _asked_of(self, model: ModelConfig, home: Home) -> AskedWork | None:
        if model.planned_range is None:
            return None
        if model.name not in self._asked:
            self._asked[model.name] = AskedWork(home.asked_of(model.name))
        return self._asked[model.name]

    def _take_clients(self, model: ModelConfig, settings: Settings) -> tuple[EngineClient, ...]:
        home = Home(settings.home)
        kind = f"{model.name} {model.path} {model.engine_options}"
        costs = self._costs.setdefault(kind, ModelCosts())
        names = [(model.name, address) for address in model.asked_engines]
        lent = {each.address for each in model.borrowed}
        return tuple(self._take_client(each, home, costs, each[1] in lent) for each in names)

    def _take_client(
        self, key: EngineKey, home: Home, costs: ModelCosts, is_lent: bool
    ) -> EngineClient:
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = (self._borrow if is_lent else self._connect)(*key)
            view = self._views[key] = EngineView(SentWork(home.sent_to(key[1])), costs)
            client.on_status = view.heard
            client.start()
        self._uses[key] = self._uses.get(key, 0) + 1
        return client

    def _retire(self, each: ServedModel) -> None:
        """Close what served a model once nobody holds one of its routes."""
        left = [len(each.routes)]
        close = partial(self._close, each.settings, each.model, _closing(each))

        async def close_after_all() -> None:
            left[0] -= 1
            if not left[0]:
                await close()
                self.on_retired()

        for route in each.routes:
            self._retirement.add(route, close_after_all)

    async def _close(
        self,
        settings: Settings,
        model: ModelConfig,
        replicas: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        for close in replicas:
            await close()
        self._own_rooms.give_back(model, settings)
        await asyncio.gather(*(self._give_back((model.name, each)) for each in model.asked_engines))

    async def _give_back(self, key: EngineKey) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._views.pop(key).close()
            await self._clients.pop(key).close()


def engines_of(served: ServedModel) -> dict[str, EngineClient]:
    """Return the engines of a model by the names of their replicas."""
    names = map(served.model.replica_name, served.model.asked_engines)
    return dict(zip(names, served.clients, strict=True))


def expected(served: ServedModel) -> Iterable[EngineClient]:
    """Yield the engines of a model that are there, or will be: all but those that may join and have
    not, whose sockets are missing, those that other cells lend, and that of a model which is
    asleep."""
    if served.model.is_asleep:
        return
    for address, client in zip(served.model.engines, served.clients, strict=False):
        if address not in served.model.joined or Path(address.removeprefix("unix:")).exists():
            yield client


def _closing(each: ServedModel) -> list[Close]:
    """Return what closes the replicas of a model. Those of engines have nothing of their own: a
    client is closed when nobody uses it."""
    if each.clients:
        return []
    return [replica.close for route in each.routes for replica in route.replicas]


def routes_of(
    model: ModelConfig,
    settings: Settings,
    clients: Sequence[EngineClient],
    rooms: Sequence[WaitingRoom | None],
    threads: PrepareThreads,
    on_asked: OnAsked,
    marks: DrainMarks,
    index: KvIndex,
    views: Sequence[EngineView],
    round_trips: RoundTrips | None = None,
) -> list[Route]:
    """Make the routes of a model and its adapters. Blocks: it reads a tokenizer."""
    if not clients:
        routes = [upstream_route(model, threads, settings, rooms)]
    else:
        from gateway.fleet.engine.routes import engine_routes  # loads the tokenizers library

        routes = list(
            engine_routes(
                model, clients, threads, on_asked, marks, index, views, round_trips=round_trips
            )
        )
    compat = settings.compat
    ignores_unknown = (model.unknown_fields or compat.unknown_fields) == "ignore"
    speaks_vllm = (model.dialect or compat.dialect) == "vllm"
    return [
        msgspec.structs.replace(each, ignores_unknown=ignores_unknown, speaks_vllm=speaks_vllm)
        for each in routes
    ]


async def await_engines(engines: Sequence[EngineClient], wait_s: float) -> None:
    """Accept nobody before the engines answer, so that a worker which replaces another refuses no
    request that the other would have served; but go on all the same where an engine is away."""
    try:
        async with asyncio.timeout(wait_s):
            await asyncio.gather(*(engine.wait_connected(wait_s) for engine in engines))
    except (TimeoutError, EngineUnavailable):
        log.warning("going on without every engine")

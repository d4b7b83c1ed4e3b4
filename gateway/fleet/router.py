"""Decides which replica is asked first, and which ones after it.

Among engines of ours by predicted seconds (`gateway.fleet.routing`), once the prompt is known: any
that is there can prepare it. Among upstreams of a request its cache key alone is known, which
steers it to where its prefix may be cached; who asks makes a difference only to which models there
are.

Keys are spread by rendezvous hashing (Thaler and Ravishankar, 1998): a replica that comes or goes
moves no key but its own. A key bounds no load. Of an engine it is worth as many seconds as the
prompt takes where nothing of it is cached, and no deadline; while an upstream is busier than the
others by more than `BUSIER` of their mean its requests go to the next one of the key's order
(consistent hashing with bounded loads, arXiv:1608.01350).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from billing.cache_contracts import ContractName
from engine.fairness import LANE_RANKS
from engine.protocol import EngineRole, KVSource, Lane
from gateway.fleet.engine_view import EngineView
from gateway.fleet.fetching import source_of
from gateway.fleet.predicted_time import PredictionError, Prompt
from gateway.fleet.replica import (
    PreparedRequest,
    Replica,
    SizedReplica,
    ViewedReplica,
    are_viewed,
    cell_of,
    is_viewed,
)
from gateway.fleet.roles import choose_by_role, choose_to_go_on, pools_of
from gateway.fleet.routing import (
    Candidate,
    Choice,
    before,
    candidates_of,
    choose,
    is_better,
    is_late,
    lead,
    with_reason,
)
from gateway.fleet.sent_work import AskedWork
from gateway.fleet.waiting_room import WaitingRoom
from gateway.generate_request import Dialect, GenerateRequest, ModelKind
from gateway.lanes import Priority
from gateway.principal import Principal
from gateway.registry.version_table import NO_VERSIONS, ComparedRequest, VersionTable
from gateway.request_errors import UnknownModel, VersionNotServed

COOL_DOWN_MIN_S = 1.0
COOL_DOWN_MAX_S = 30.0
"""A replica that failed comes last for so long; each further failure in a row doubles it."""
MIN_LATE_S = 0.5
"""No first token is late before: asking twice for less costs more than it brings."""
MAX_DOUBLINGS = 5
"""As many reach `COOL_DOWN_MAX_S`; two to the power of all failures is more than a float holds."""

BUSIER, BUSIER_REQUESTS = 0.25, 1.0
"""The slack, as a share of the mean load and in requests per weight: a replica that has the prefix
is preferred while its load stays within it."""
DRAW_BYTES = 7
"""How many bytes of a digest make the draw: 56 bits, three more than a float's mantissa."""


def whenever(_idle_prefill_s: float | None) -> float | None:
    """Return None: a first token is worth having whenever it comes."""
    return None


def affinity(request: GenerateRequest, principal: Principal) -> bytes | None:
    """Return what a request has in common with those that it should meet; None: nothing is
    known."""
    if request.cache_key is None:
        return None
    return hashlib.blake2b(f"{principal.org_id}\n{request.cache_key}".encode()).digest()


class RoutedRequest(msgspec.Struct, kw_only=True):
    """The replicas of a request, the best first, and what was predicted of it."""

    replicas: Sequence[Replica]
    soonest_s: float | None = None
    """The least predicted seconds to its first token, over all replicas; None: nobody knows."""
    views: Sequence[EngineView] = ()
    """The views of the engines that can be asked."""
    num_tokens: int = 0
    """The tokens of its prompt."""
    choice: Choice | None = None
    """None: there was nothing to choose from."""
    prompt: Prompt | None = None
    """As the first replica would compute it; None: that is no engine of ours."""
    lane: Lane = "interactive"
    predicted_s: float | None = None
    """The prediction for the first replica, uncorrected."""
    fetch: KVSource | None = None
    """The engine that the first replica is to read from."""
    place: float = 0.0
    """Its place in the queue of its lane at the first replica, once it is sent: see
    `EngineView.send`."""
    error: PredictionError | None = None
    """Hears what came of the prediction."""

    @property
    def is_one_free(self) -> bool:
        """Tell whether an engine is free for its lane. What its prompt takes that one may be far
        from all that it has learnt of, and only what runs teaches it more: it is not refused."""
        rank = LANE_RANKS[self.lane]
        return any(view.is_free(rank) for view in self.views)

    @property
    def idle_prefill_s(self) -> float | None:
        """Return what its prompt would take an idle engine; None: nobody knows."""
        return idle_prefill_s(self.views, self.num_tokens)

    @property
    def status_age_s(self) -> float:
        """Return the age of the oldest status that it was chosen by."""
        if not self.views:
            return 0.0
        return self.views[0].clock() - min(view.heard_at_s for view in self.views)

    @property
    def late_after_s(self) -> float | None:
        """Return after how many seconds the first token is late beside what was predicted; None:
        nothing was."""
        if self.error is None or self.predicted_s is None:
            return None
        return max(MIN_LATE_S, self.error.late_s(self.predicted_s))

    def for_first(self, prepared: PreparedRequest) -> PreparedRequest:
        """Return the request as the first replica is asked it."""
        splits = self.choice is not None and self.choice.split is not None
        if (prepared.fetch, prepared.prefill_only) == (self.fetch, splits):
            return prepared
        return msgspec.structs.replace(prepared, fetch=self.fetch, prefill_only=splits)

    @property
    def prompt_s(self) -> float:
        """Return the seconds that the first engine would take for its prompt if nothing else ran;
        0: nobody knows."""
        first = self.replicas[0]
        if self.prompt is None or not is_viewed(first) or not first.view.price.is_learnt:
            return 0.0
        return first.view.price.idle_seconds(self.prompt.missing)

    def send(self) -> None:
        """Let all workers know that the first replica will be asked."""
        first = self.replicas[0]
        if self.prompt is not None and is_viewed(first):
            self.place = first.view.send(self.prompt, self.lane)

    def came(self, took_s: float) -> float | None:
        """Note how long its first token took; return by how much the prediction was wrong."""
        if self.error is None or self.predicted_s is None:
            return None
        predicted_s = self.predicted_s * self.error.factor
        self.error.observe(self.predicted_s, took_s)
        return abs(took_s - predicted_s)


class Route(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """A model as customers name it, and what serves it. Whoever uses a replica of it holds the
    route until then: one that was replaced closes its replicas when nobody does."""

    model: str
    kind: ModelKind
    replicas: tuple[Replica, ...]
    rooms: tuple[WaitingRoom, ...] = ()
    """The waiting rooms of those upstreams that have one."""
    cache_contract: ContractName | None = None
    """The contract by which reused tokens are counted; None: an upstream counts by itself."""
    parent: str | None = None
    """The model that this one adapts; None: it stands for itself."""
    ignores_unknown: bool = False
    """Fields of requests that nobody here knows are left out, not refused."""
    asked: AskedWork | None = None
    """Counts what is asked of it and of all that the same engines serve; None: nobody plans by it.
    """
    is_asleep: bool = False
    """Its engines are started when somebody asks for it (`gateway.fleet.planner`)."""
    wakes_in_s: float | None = None
    """How long that took when it was last; None: nobody knows."""
    has_roles: bool = False
    """Some of its engines compute prompts for the others."""
    has_borrowed: bool = False
    """Other cells may lend engines of it."""
    speaks_vllm: bool = False
    """Our engine does as vLLM's servers do where they do otherwise than OpenAI."""

    def role_of(self, replica: Replica) -> EngineRole | None:
        """Return what a replica of it does of requests; None: it is an upstream."""
        if not is_viewed(replica):
            return None
        if not self.has_roles:
            return "both"
        return "prefill" if replica.is_prefill else "decode"

    @property
    def dialect(self) -> Dialect:
        return "vllm" if self.speaks_vllm and self.kind == "engine" else self.kind

    def pool_states(self) -> dict[str, int]:
        """Count its engines by state; of a model that is asleep there is none. `away`: it starts,
        has not joined, or is down."""
        if self.is_asleep:
            return {"serving": 0, "drained": 0, "away": 0, "asleep": 1}
        loads = [each.health() for each in self.replicas if cell_of(each) is None]
        there = [each for each in loads if each.available]
        drained = sum(each.is_drained for each in there)
        return {
            "serving": len(there) - drained,
            "drained": drained,
            "away": len(loads) - len(there),
            "asleep": 0,
        }

    @property
    def max_model_len(self) -> int | None:
        """Return the tokens that a prompt and its answer may have together, where one of its
        replicas knows."""
        sized = (each.max_model_len for each in self.replicas if isinstance(each, SizedReplica))
        return min((length for length in sized if length is not None), default=None)


class Fleet:
    """The models that are served. `routes`: at most one per model; each with at least one
    replica."""

    def __init__(
        self,
        routes: Iterable[Route],
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        fetches: bool = True,
    ) -> None:
        """`fetches`: engines may be told to read from each other."""
        self._fetches = fetches
        self._routes = {route.model: route for route in routes}
        self.versions: VersionTable = NO_VERSIONS
        """The versions of the models, and who gets which."""
        self._clock = clock
        self._rng = rng or random.Random()
        self._failures: dict[Replica, Failures] = {}
        self._errors: dict[tuple[str, Lane, bool], PredictionError] = {}
        """By model and lane, and whether other cells lend the engines: what comes of a backlog of
        batches says nothing of who goes before it."""

    @property
    def routes(self) -> Sequence[Route]:
        return tuple(self._routes.values())

    def replace(self, routes: Iterable[Route]) -> None:
        """Serve these from now on. Replicas that are in none of them are the caller's to close,
        once nobody holds their route any more."""
        self._routes = {route.model: route for route in routes}
        served = set(self._replicas())
        self._failures = {each: it for each, it in self._failures.items() if each in served}
        self._errors = {key: it for key, it in self._errors.items() if key[0] in self._routes}

    def resolve(self, model: str, principal: Principal) -> Route:
        """Return the route of the model, or of the version of it that the caller gets. Raises
        UnknownModel, for what is not served and for what it may not use alike; VersionNotServed."""
        route = self._routes.get(model)
        if route is None or not principal.may_use(model):
            raise UnknownModel(
                f"The model `{model}` does not exist or you do not have access to it.",
                param="model",
            )
        if self.versions.models:
            return self._version_for(route, principal)
        return route

    def route_of(self, served_by: str) -> Route | None:
        """Return the route of a served model by its own name, whoever asks; None: there is none."""
        return self._routes.get(served_by)

    def version_of(self, model: str, route: Route) -> int | None:
        """Return the number of the version of a model that a route serves; None: it has none."""
        return self.versions.number_of(model, route.model) if self.versions.models else None

    def _version_for(self, route: Route, principal: Principal) -> Route:
        """Raises: VersionNotServed."""
        versioned = self.versions.models.get(route.model)
        chosen = None if versioned is None else versioned.choose(principal)
        if versioned is not None and chosen is not None and chosen.pin is None:
            if self._is_available(chosen.version.served_by, route):
                return self._routes[chosen.version.served_by]
            chosen = versioned.pinned_for_all  # nobody goes without an answer for a rollout
        if chosen is None or chosen.pin is None:
            return route
        found = self._routes.get(chosen.version.served_by)
        if found is not None and found.kind == route.kind:
            return found
        raise VersionNotServed(
            f"The version {chosen.version.version} of the model `{route.model}`, to which this"
            f" {chosen.pin.scope} is pinned, is not served.",
            param="model",
        )

    def _is_available(self, served_by: str, route: Route) -> bool:
        """Tell whether a served model of the route's kind takes requests, or wakes up for one."""
        found = self._routes.get(served_by)
        if found is None or found.kind != route.kind:
            return False
        return found.is_asleep or any(each.health().available for each in found.replicas)

    def compared(self, model: str, principal: Principal, route: Route) -> ComparedRequest | None:
        """Return how a request that a route of the model serves is compared with those of another
        version; None: no rollout does that."""
        versioned = self.versions.models.get(model)
        return None if versioned is None else versioned.compared(principal, route.model)

    def only_model(self, principal: Principal) -> str | None:
        """Return the model that is meant by who names none: the only one that it may use, whose
        adapters do not count beside it. None: there are several, or none."""
        usable = [each for each in self.routes if principal.may_use(each.model)]
        names = {each.model for each in usable}
        apart = [each.model for each in usable if each.parent not in names]
        return apart[0] if len(apart) == 1 else None

    def order(self, route: Route, affinity: bytes | None = None) -> Sequence[Replica]:
        """Return all that are not drained, healthy ones before failing ones. Engines of ours are
        ordered by `choose`; others are by what waits here for them, then drawn by weight. With an
        affinity the draw is the same each time, and small differences of load count for nothing.
        Whoever asks for the replicas of a model that is asleep wakes it."""
        if route.is_asleep and route.asked is not None:
            route.asked.note("interactive")
        if len(route.replicas) == 1:
            return route.replicas
        if are_viewed(route.replicas):
            engines: Sequence[ViewedReplica] = route.replicas
            if route.has_borrowed:  # who is not lent now is no reason to wait for anybody
                engines = [each for each in engines if each.cell is None or each.is_available]
            able = self._able_first(engines)
            if route.has_roles:
                # Those that decode say how long a request may be: a prompt need not go elsewhere.
                able = sorted(able, key=lambda each: each.is_prefill)
            return able
        found = [(each, each.health()) for each in route.replicas]
        # Where all are, a change of settings took away the last one that was not.
        found = [each for each in found if not each[1].is_drained] or found
        replicas = [each for each, _ in found]
        loads = [state.backlog for _, state in found]
        if affinity is not None:
            mean = statistics.fmean(loads)
            most = mean + max(BUSIER * mean, BUSIER_REQUESTS)
            loads = [0.0 if load <= most else load for load in loads]
        draws = self._draws(replicas, affinity)
        failing = [self._is_failing(each, state.available) for each, state in found]
        ranks = zip(failing, loads, draws, strict=True)
        ranked = sorted(zip(ranks, replicas, strict=True), key=lambda each: each[0])
        return [replica for _, replica in ranked]

    def choose(
        self,
        route: Route,
        replicas: Sequence[Replica],
        prepared: PreparedRequest,
        priority: Priority,
        affinity: bytes | None = None,
        latest_s: Callable[[float | None], float | None] = whenever,
    ) -> RoutedRequest:
        """Predict for a request, and let the soonest engine be the first, or the one that an
        affinity leads to. `replicas`: of the route, as `order` has them; `prepared`: by the first
        of them. `latest_s`: returns the seconds from now within which its first token is worth
        having, by what its prompt would take an idle engine; None: whenever."""
        if route.has_borrowed and are_viewed(replicas):
            return self._choose_cell(route, replicas, prepared, priority, affinity, latest_s)
        return self._choose_among(route, replicas, prepared, priority, affinity, latest_s)

    def _choose_cell(
        self,
        route: Route,
        replicas: Sequence[ViewedReplica],
        prepared: PreparedRequest,
        priority: Priority,
        affinity: bytes | None,
        latest_s: Callable[[float | None], float | None],
    ) -> RoutedRequest:
        """Let a request stay in its cell, unless that is down or late for it. Engines that other
        cells lend come after those of the own one that are up, in any case."""
        own = [each for each in replicas if each.cell is None]
        lent = self._able([each for each in replicas if each.cell is not None])
        up = self._able(own)
        arguments = (prepared, priority, affinity, latest_s)
        if not lent:
            return self._choose_among(route, own or replicas, *arguments)
        if not up:
            there = self._choose_among(route, lent, *arguments, always=True)
            assert there.choice is not None
            return msgspec.structs.replace(
                there,
                replicas=[*there.replicas, *own],
                choice=with_reason(there.choice, "cell_down"),
            )
        here = self._choose_among(route, own, *arguments, always=True)
        down = [each for each in here.replicas if each not in up]
        ordered = [each for each in here.replicas if each in up]
        promised_s = latest_s(here.idle_prefill_s)
        if is_late(here.soonest_s, promised_s) and not here.is_one_free:
            there = self._choose_among(route, lent, *arguments, always=True)
            if is_better(there.soonest_s, here.soonest_s, promised_s):
                assert here.choice is not None and there.choice is not None
                return msgspec.structs.replace(
                    there,
                    replicas=[*there.replicas, *ordered, *down],
                    views=[*there.views, *here.views],
                    choice=before(there.choice, here.choice, "cell_late"),
                )
        return msgspec.structs.replace(here, replicas=[*ordered, *lent, *down])

    def _choose_among(
        self,
        route: Route,
        replicas: Sequence[Replica],
        prepared: PreparedRequest,
        priority: Priority,
        affinity: bytes | None,
        latest_s: Callable[[float | None], float | None],
        *,
        always: bool = False,
    ) -> RoutedRequest:
        """As `choose`, among replicas of one cell. `always`: also where there is one alone."""
        if not are_viewed(replicas):
            known = [each.predicted_ttft_s(prepared, priority) for each in replicas]
            sooner = [each for each in known if each is not None]
            soonest_s = min(sooner) if len(sooner) == len(known) else None
            return RoutedRequest(replicas=replicas, soonest_s=soonest_s)
        is_lent = route.has_borrowed and replicas[0].cell is not None
        kind = (route.model, priority.lane, is_lent)
        error = self._errors.setdefault(kind, PredictionError())
        factor, tokens = error.factor, prepared.input_tokens
        able = (self._able(replicas) or replicas) if len(replicas) > 1 else replicas
        cached, views = able[0].cached_tokens(prepared, able), [each.view for each in able]
        if (source := prepared.computed_by) is not None:
            has_all = [tokens if each.name == source else 0 for each in able]
            cached = [*map(max, cached, has_all)]
        candidates = candidates_of(
            *(views, tokens, cached, priority.lane, factor), fetches=self._fetches and not is_lent
        )
        if is_lent:
            candidates = [*map(farther, candidates, able)]
        choice, best = None, 0
        if len(replicas) > 1 or always:
            choice = self._choose(route, able, prepared, candidates, affinity, latest_s, factor)
            best = choice.order[0]
            chosen = [able[at] for at in choice.order]
            others = []
            if len(chosen) < len(replicas):
                others = [each for each in replicas if each not in chosen]
            replicas = [*chosen, *others]
        knows = all(view.price.is_learnt for view in views)
        first = candidates[best]
        return RoutedRequest(
            replicas=replicas,
            soonest_s=(first.predicted_s if choice is None else choice.least_s) if knows else None,
            views=views,
            num_tokens=tokens,
            choice=choice,
            prompt=Prompt.of(tokens, first.front),
            fetch=source_of(views, first.fetch),
            lane=priority.lane,
            predicted_s=first.predicted_s / factor if knows else None,
            error=error,
        )

    def others(self, route: Route, view: EngineView) -> Sequence[ViewedReplica]:
        """Return the engines of a route, of its own cell, that can be asked in place of the one
        with this view."""
        if not are_viewed(route.replicas):
            return ()
        own = [each for each in route.replicas if each.cell is None and not each.is_drained]
        return [each for each in self._able(own) if each.view is not view]

    def _choose(
        self,
        route: Route,
        able: Sequence[ViewedReplica],
        prepared: PreparedRequest,
        candidates: Sequence[Candidate],
        affinity: bytes | None,
        latest_s: Callable[[float | None], float | None],
        factor: float,
    ) -> Choice:
        """Order the engines that can be asked, of which there may be one."""
        views, tokens = [each.view for each in able], prepared.input_tokens
        pools = pools_of([each.is_prefill for each in able]) if route.has_roles else None
        decode = range(len(able)) if pools is None else pools.decode
        if pools is not None and prepared.computed_by is not None:
            return choose_to_go_on(candidates, views, decode)
        choice = choose(candidates, decode if pools is not None else None)
        if affinity is not None:
            home = decode[self._home([able[at] for at in decode], affinity)]
            worth_s = factor * views[home].price.own_seconds(tokens)
            choice = lead(choice, home, worth_s, latest_s(idle_prefill_s(views, tokens)))
        if pools is None or not self._fetches or not able[0].may_split(prepared):
            return choice
        promised_s = latest_s(idle_prefill_s(views, tokens))
        return choose_by_role(choice, views, pools, tokens, promised_s)

    def report(self, replica: Replica, *, ok: bool) -> None:
        """Record what came of asking it; `ok=False` when nothing ran, or it was lost amid it. What
        fails while it cools down failed with it: an engine that dies may take many along."""
        if ok:
            self._failures.pop(replica, None)
            return
        failures = self._failures.setdefault(replica, Failures())
        if self._clock() < failures.until:
            return
        failures.in_a_row += 1
        doublings = min(failures.in_a_row - 1, MAX_DOUBLINGS)
        cool_down_s = min(COOL_DOWN_MIN_S * 2**doublings, COOL_DOWN_MAX_S)
        failures.until = self._clock() + cool_down_s

    async def start(self) -> None:
        for replica in self._replicas():
            await replica.start()

    async def close(self) -> None:
        """Close all at once: one that hangs may take its moment, and not one after the other."""
        await asyncio.gather(*(replica.close() for replica in self._replicas()))

    def _replicas(self) -> Iterable[Replica]:
        return (replica for route in self._routes.values() for replica in route.replicas)

    def _able_first(self, engines: Sequence[ViewedReplica]) -> Sequence[ViewedReplica]:
        """Return those that are not drained (where all are, a change of settings took away the last
        one that was not), healthy ones first."""
        asked = [each for each in engines if not each.is_drained] or engines
        able = self._able(asked)
        if len(able) == len(asked):
            return able
        return [*able, *(each for each in asked if self._is_failing(each, each.is_available))]

    def _able(self, engines: Sequence[ViewedReplica]) -> Sequence[ViewedReplica]:
        if not self._failures:
            return [each for each in engines if each.is_available]
        return [each for each in engines if not self._is_failing(each, each.is_available)]

    def _is_failing(self, replica: Replica, is_available: bool) -> bool:
        failures = self._failures.get(replica)
        cools_down = failures is not None and self._clock() < failures.until
        return cools_down or not is_available

    def _home(self, engines: Sequence[Replica], affinity: bytes) -> int:
        """Return the position of the engine that a client's key leads to."""
        draws = self._draws(engines, affinity)
        return draws.index(min(draws))

    def _draws(self, replicas: Sequence[Replica], affinity: bytes | None) -> Sequence[float]:
        """Draw exponential numbers, divided by the weights: they order by weight without
        replacement (Efraimidis and Spirakis, 2006)."""
        if affinity is None:
            return [self._rng.expovariate(each.weight) for each in replicas]
        return [-math.log(uniform(affinity, each.name)) / each.weight for each in replicas]


def farther(candidate: Candidate, engine: ViewedReplica) -> Candidate:
    """Return what is predicted of an engine by whoever is in another cell."""
    seconds = candidate.predicted_s + engine.round_trip()
    return msgspec.structs.replace(candidate, predicted_s=seconds)


def idle_prefill_s(views: Iterable[EngineView], num_tokens: int) -> float | None:
    """Return what a prompt would take an idle engine; None: nobody knows."""
    prices = (view.price for view in views)
    known = [price.idle_seconds(num_tokens) for price in prices if price.is_learnt]
    return min(known, default=None)


def uniform(affinity: bytes, name: str) -> float:
    """Draw a number in (0, 1), the same in every process."""
    digest = hashlib.blake2b(name.encode(), key=affinity, digest_size=DRAW_BYTES).digest()
    return math.ldexp(int.from_bytes(digest) + 0.5, -8 * DRAW_BYTES)


class Failures(msgspec.Struct):
    in_a_row: int = 0
    until: float = 0.0
    """Clock seconds."""

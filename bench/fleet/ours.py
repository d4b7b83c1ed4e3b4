"""The routing that Tollgate ships, on virtual time: `gateway.fleet.routing` over a view of each
replica by each worker, whose counts of what was sent all workers share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bench.fleet.trace import BLOCK_TOKENS
from bench.fleet.world import NUM_WORKERS, FleetWorld, RequestFate
from engine.protocol import ReplicaStatus
from gateway.fleet.engine_view import EngineView
from gateway.fleet.predicted_time import ModelCosts, PredictionError, Prompt
from gateway.fleet.roles import choose_by_role, choose_to_go_on, pools_of
from gateway.fleet.router import idle_prefill_s
from gateway.fleet.routing import Candidate, Choice, candidates_of, choose
from gateway.fleet.sent_work import SentWork
from gateway.lanes import Slo


class PredictedTime:
    """Chooses by predicted seconds. `slo`: what comes later than this on every replica is refused;
    None: nothing is."""

    def __init__(self, world: FleetWorld, rng: random.Random, slo: Slo | None = None) -> None:
        self.world, self.slo, self.now_s = world, slo, 0.0
        self.views: list[list[EngineView]] = [[] for _ in range(NUM_WORKERS)]
        self.costs = [ModelCosts() for _ in range(NUM_WORKERS)]
        self.serving: list[int] = []
        """The replicas that a request may go to."""
        for number in range(world.setup.num_replicas):
            self.meet(number)
        self.errors = [PredictionError() for _ in range(NUM_WORKERS)]
        self._raw: dict[int, float] = {}
        """Predictions before they were corrected, by the request's object."""

    def meet(self, replica: int) -> None:
        """Take up a replica, the one after those that were ever met."""
        sent = SentWork()
        for views, costs in zip(self.views, self.costs, strict=True):
            assert len(views) == replica
            views.append(EngineView(sent, costs, clock=lambda: self.now_s))
        self.serving.append(replica)

    def heard(self, replica: int, status: ReplicaStatus, now_s: float) -> None:
        self.now_s = max(self.now_s, now_s)
        for views in self.views:
            views[replica].heard(status)

    def choose(self, fate: RequestFate, now_s: float) -> int | None:
        self.now_s = max(self.now_s, now_s)
        asked, all_views = fate.asked, self.views[fate.worker]
        views = [all_views[number] for number in self.serving]
        cached = [
            BLOCK_TOKENS * self.world.replicas[number].cache.cached_blocks(asked.hash_ids)
            for number in self.serving
        ]
        factor = self.errors[fate.worker].factor
        candidates = candidates_of(
            *(views, asked.input_length, cached, "interactive", factor), fetches=False
        )
        choice = self.choice_of(views, candidates, fate)
        is_late = self.slo is not None and choice.least_s > self._limit_s(fate, self.slo)
        view, found = views[choice.order[0]], candidates[choice.order[0]]
        prompt = Prompt(asked.input_length - found.cached, found.cached)
        self.note(prompt, view.price.idle_seconds(prompt.missing), is_late=is_late)
        if is_late:
            return None
        fate.place = view.send(prompt, "interactive")
        fate.predicted_s = found.predicted_s
        self._raw[id(fate)] = found.predicted_s / factor
        return self.serving[choice.order[0]]

    def note(self, prompt: Prompt, prompt_s: float, *, is_late: bool) -> None:
        """Hear of a request's prompt what it would take an idle replica, and whether it is refused;
        for who plans by it."""

    def choice_of(
        self, views: Sequence[EngineView], candidates: Sequence[Candidate], fate: RequestFate
    ) -> Choice:
        return choose(candidates)

    def began(self, fate: RequestFate) -> None:
        self.errors[fate.worker].observe(self._raw.pop(id(fate)), fate.ttft_s)

    def _limit_s(self, fate: RequestFate, slo: Slo) -> float:
        idle_s = idle_prefill_s(self.views[fate.worker], fate.asked.input_length)
        return slo.first_token_limit_s(idle_s)


class PredictedTimeByRole(PredictedTime):
    """The same where the first replicas compute prompts for the others. `ttft_s`: the objective of
    first tokens; None: there is none."""

    def __init__(self, world: FleetWorld, rng: random.Random, ttft_s: float | None = None) -> None:
        super().__init__(world, rng)
        self._ttft_s = ttft_s

    def choice_of(
        self, views: Sequence[EngineView], candidates: Sequence[Candidate], fate: RequestFate
    ) -> Choice:
        setup = self.world.setup
        pools = pools_of([at < setup.num_prefill for at in range(setup.num_replicas)])
        assert pools is not None, "a world without roles"
        choice = choose(candidates, pools.decode)
        if fate.asked.output_length > 1:
            tokens = fate.asked.input_length
            choice = choose_by_role(choice, views, pools, tokens, self._ttft_s)
        fate.moves = choice.split is not None
        return choice

    def choose_next(self, fate: RequestFate, now_s: float) -> int:
        self.now_s = max(self.now_s, now_s)
        views, tokens = self.views[fate.worker], fate.asked.input_length
        setup = self.world.setup
        pool = range(setup.num_prefill, setup.num_replicas)
        candidates = candidates_of(
            *(views, tokens, [tokens] * len(views), "interactive"), fetches=False
        )
        chosen = choose_to_go_on(candidates, views, pool).order[0]
        views[chosen].send(Prompt.of(tokens, tokens), "interactive")
        return chosen

"""Predicts how many seconds a replica takes to a request's first token.

Pure. One unit for all that a choice weighs: what waits there before it, what of its own prompt is
not cached, and the decodes that share each step with it, by the step costs that the replica's
engine has learnt (`engine.protocol.StepCosts`). Of two prompts that lack as many tokens the one
behind a longer cached front takes longer: each token is paired with all before it.

What waits in other lanes and comes first anyway, comes as far as the lanes' weights let it
(`engine.fairness`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane, ReplicaStatus, StepCosts

UNLEARNT = StepCosts(prompt_token_s=1e-4, pair_s=1e-9)
"""A guess where no engine has said: enough to tell prompts apart, and nothing to refuse by."""
UNTOLD = StepCosts()
MIN_CHUNK = 16
"""Prompt tokens that a step takes at least (`engine.scheduling.pace`)."""
STEADY_S = 0.02
"""Predictions are compared with what they were about beside so much: below it all is noise."""
WEIGHT = 0.1
"""The weight of the newest observation of an error."""
MOST_CORRECTED = 4.0
"""A prediction is corrected by this factor at most, and by its inverse at least."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt of which `cached` tokens are found, and `missing` ones are to be computed."""

    missing: int
    cached: int = 0

    @staticmethod
    def of(tokens: int, cached: int) -> Prompt:
        """Return a prompt of so many tokens, the last of which is always computed."""
        front = max(0, min(cached, tokens - 1))
        return Prompt(tokens - front, front)

    @property
    def pairs(self) -> float:
        return self.missing * (self.cached + (self.missing + 1) / 2)


class StepPrice(msgspec.Struct, frozen=True, gc=False):
    """The price of steps at a replica as it is now."""

    costs: StepCosts = UNLEARNT
    beside_s: float = 0.0
    """Seconds of a step that its prompts do not take."""
    chunk: int = MIN_CHUNK
    """Prompt tokens a step."""
    decodes: int = 0
    is_learnt: bool = False

    @staticmethod
    def of(status: ReplicaStatus) -> StepPrice:
        costs, is_learnt = status.costs, status.costs != UNTOLD
        decodes = sum(each.num_running for each in status.lanes.values())
        beside_s = costs.step_s + costs.decode_s * decodes
        beside_s += costs.context_token_s * status.context_tokens
        chunk = max(MIN_CHUNK, status.max_step_tokens - decodes)
        return StepPrice(costs if is_learnt else UNLEARNT, beside_s, chunk, decodes, is_learnt)

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return what prompts take that fill their steps."""
        costs = self.costs
        steps_s = (self.beside_s * tokens + costs.chunk_context_token_s * pairs) / self.chunk
        return costs.prompt_token_s * tokens + costs.pair_s * pairs + steps_s

    def own_seconds(self, prompt: Prompt) -> float:
        """Return what one prompt takes, a whole number of steps."""
        steps = max(1, math.ceil(prompt.missing / self.chunk))
        alone = self.seconds(prompt.missing, prompt.pairs)
        return alone + self.beside_s * (steps - prompt.missing / self.chunk)

    def idle_seconds(self, prompt: Prompt) -> float:
        """Return what one prompt would take if nothing else ran."""
        idle = msgspec.structs.replace(self, beside_s=self.costs.step_s)
        return idle.own_seconds(prompt)


def ahead(waiting_s: Mapping[Lane, float], lane: Lane, own_s: float) -> float:
    """Return the seconds of all that is computed before a request of a lane has had its own: what
    waits in its lane, and of others as much as their weight lets them have meanwhile."""
    mine = waiting_s.get(lane, 0.0)
    until_mine, weight = mine + own_s, LANE_WEIGHTS[lane]
    for other, seconds in waiting_s.items():
        if other != lane and seconds:
            mine += min(seconds, until_mine * LANE_WEIGHTS[other] / weight)
    return mine


class PredictionError:
    """Keeps how predictions of one model turned out, and corrects the next ones by it: what a
    formula does not know (an engine that paces its prompts) shows as a factor that lasts. One for
    all replicas: one that looked slow once would not be asked again, and never look better."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def observe(self, predicted_s: float, took_s: float) -> None:
        """`predicted_s`: before any correction."""
        found = math.log((took_s + STEADY_S) / (predicted_s + STEADY_S))
        most = math.log(MOST_CORRECTED)
        self._log += WEIGHT * (max(-most, min(most, found)) - self._log)

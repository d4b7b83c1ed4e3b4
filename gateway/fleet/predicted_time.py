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
from collections.abc import Sequence

import msgspec

from engine.fairness import LANE_WEIGHTS
from engine.protocol import ReplicaStatus, StepCosts

GUESSED = StepCosts(prompt_token_s=1e-4, pair_s=1e-9)
"""A guess where no engine of a model has said: enough to tell prompts apart, and nothing to refuse
by."""
UNTOLD = StepCosts()
MIN_CHUNK = 16
"""Prompt tokens that a step takes at least (`engine.scheduling.pace`)."""
STEADY_S = 0.02
"""Predictions are compared with what they were about beside so much: below it all is noise."""
WEIGHT = 0.1
"""The weight of the newest observation of an error."""
MOST_CORRECTED = 4.0
"""A prediction is corrected by this factor at most, and by its inverse at least."""
LATE_SHARE = 0.05
"""A first token counts as late where so few come later beside their prediction."""
LATE_WEIGHT = 0.1
LEAST_LATE, MOST_LATE = 2.0, 16.0
"""Late is this times the prediction at least, and at most."""
_WEIGHTS = [*LANE_WEIGHTS.values()]
SHARES: tuple[tuple[float, ...], ...] = tuple(
    tuple(
        0.0 if other == mine else weight / _WEIGHTS[mine] for other, weight in enumerate(_WEIGHTS)
    )
    for mine in range(len(_WEIGHTS))
)
"""By the rank of a lane and of another: what the other gets of the steps for each part of it."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt of which `cached` tokens are found, and `missing` ones are to be computed."""

    missing: int
    cached: int = 0

    @staticmethod
    def of(tokens: int, cached: int) -> Prompt:
        """Return a prompt of so many tokens, the last of which is always computed."""
        front = max(0, min(cached, tokens - 1))
        return Prompt(tokens - front, front)


class StepPrice(msgspec.Struct, frozen=True, gc=False):
    """The price of steps at a replica as it is now."""

    token_s: float = GUESSED.prompt_token_s
    pair_s: float = GUESSED.pair_s
    """The seconds of a token of a prompt with one before it, its part of reading that for a chunk
    among them."""
    step_s: float = 0.0
    """Seconds of a step in which nothing runs."""
    beside_s: float = 0.0
    """Seconds of a step that its prompts do not take."""
    chunk: int = MIN_CHUNK
    """Prompt tokens a step."""
    decodes: int = 0
    is_learnt: bool = False

    @staticmethod
    def of(status: ReplicaStatus, costs: StepCosts) -> StepPrice:
        """`costs`: its own or those of another engine of its model; UNTOLD: nobody knows."""
        is_learnt = costs != UNTOLD
        costs = costs if is_learnt else GUESSED
        decodes = sum(each.num_running for each in status.lanes.values())
        chunk = max(MIN_CHUNK, status.max_step_tokens - decodes)
        return StepPrice(
            token_s=costs.prompt_token_s,
            pair_s=costs.pair_s + costs.chunk_context_token_s / chunk,
            step_s=costs.step_s,
            beside_s=costs.step_s
            + costs.decode_s * decodes
            + costs.context_token_s * status.context_tokens,
            chunk=chunk,
            decodes=decodes,
            is_learnt=is_learnt,
        )

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return what prompts take that fill their steps."""
        return (self.token_s + self.beside_s / self.chunk) * tokens + self.pair_s * pairs

    def own_seconds(self, missing: int, cached: int = 0) -> float:
        """Return what one prompt takes, a whole number of steps."""
        pairs = missing * (cached + 0.5 * (missing + 1))
        return (
            self.token_s * missing + self.pair_s * pairs - self.beside_s * (-missing // self.chunk)
        )

    def held_up_seconds(self, missing: int, cached: int = 0) -> float:
        """Return by how much one prompt holds up each request that decodes beside it."""
        pairs = missing * (cached + 0.5 * (missing + 1))
        return self.token_s * missing + self.pair_s * pairs

    def idle_seconds(self, missing: int) -> float:
        """Return what one prompt would take if nothing else ran and nothing were cached."""
        idle = msgspec.structs.replace(self, beside_s=self.step_s)
        return idle.own_seconds(missing)


class ModelCosts:
    """The step costs that an engine of a model has told last: an engine that has learnt nothing yet
    is priced by them, being of the same kind as its siblings."""

    def __init__(self) -> None:
        self.latest = UNTOLD

    def known(self, own: StepCosts) -> StepCosts:
        """Return the costs of an engine which says these of its own."""
        if own != UNTOLD:
            self.latest = own
        return self.latest if own == UNTOLD else own


def ahead(waiting_s: Sequence[float], rank: int, own_s: float) -> float:
    """Return the seconds of all that is computed before a request of a lane has had its own: what
    waits in its lane, and of others as much as their weight lets them have meanwhile.
    `waiting_s`: by the lanes' ranks."""
    mine = waiting_s[rank]
    until_mine = mine + own_s
    for seconds, share in zip(waiting_s, SHARES[rank], strict=True):
        if seconds and share:
            mine += min(seconds, until_mine * share)
    return mine


class PredictionError:
    """Keeps how predictions of one model turned out, and corrects the next ones by it: what a
    formula does not know (an engine that paces its prompts) shows as a factor that lasts. One for
    all replicas: one that looked slow once would not be asked again, and never look better."""

    __slots__ = ("_late_log", "_log")

    def __init__(self) -> None:
        self._log = 0.0
        self._late_log = math.log(LEAST_LATE)

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def late_s(self, predicted_s: float) -> float:
        """Return after how long a first token is late, by how late few of them came."""
        return (self.factor * predicted_s + STEADY_S) * math.exp(self._late_log)

    def observe(self, predicted_s: float, took_s: float) -> None:
        """`predicted_s`: before any correction."""
        found = math.log((took_s + STEADY_S) / (predicted_s + STEADY_S))
        step = LATE_WEIGHT * ((found - self._log > self._late_log) - LATE_SHARE)
        late_log = min(math.log(MOST_LATE), self._late_log + step)
        self._late_log = max(math.log(LEAST_LATE), late_log)
        most = math.log(MOST_CORRECTED)
        self._log += WEIGHT * (max(-most, min(most, found)) - self._log)

"""Computes how many replicas a load needs to meet an objective.

Pure. All is in seconds of one replica's work a second. A replica serves prompts beside decodes: the
decodes of n replicas take the part g = G/n of their time, so each prompt takes 1/(1-g) as long, and
a prompt waits as in a queue with n servers (Sakasegawa's approximation of the probability that all
are busy, an exponential tail by the residual work of a prompt). A token takes a step's fixed
seconds over the part of the time that is left for it, so the objective of tokens bounds what all
else may take.

Where some replicas compute prompts for the others, those read what was computed between the first
token and the next. That delays the others of its answer, not the first one, and holds up nobody
else; a replica reads one prompt after the other (M/M/1). All is by the mean: short answers behind
long prompts are slower than it says.
"""

from __future__ import annotations

import math

import msgspec

from gateway.lanes import Slo

MOST_BUSY = 0.95
"""No replica is planned to work for more of its time."""
MOST_STEP_SHARE = 0.6
"""A step's fixed seconds count as this part of the token's objective at most: an objective that no
replica can meet is not met by more of them."""


class PromptTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Says what it takes to read the KV of a prompt, as long as they are on average, from the
    replica that computed it."""

    seconds: float
    tokens: float
    """Those of a prompt."""
    is_learnt: bool
    """False: nothing was read here yet, and it is what engines assume until then."""


class PoolLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a model that somebody waits for."""

    prompts_s: float
    """Seconds of prompts a second, as an idle replica computes them."""
    decodes_s: float
    """Seconds a second that tokens take beyond the fixed part of their steps."""
    mean_prompt_s: float
    residual_s: float
    """The seconds that are left of a prompt at a random moment of it: E[S^2] / 2 E[S]."""
    step_s: float
    """The fixed part of a step."""
    rate: float = 0.0
    """Requests a second."""
    answer_tokens: float = 0.0
    """The tokens of an answer, on average."""
    transfer: PromptTransfer | None = None
    """None: no replica can read another one's."""

    @property
    def work_s(self) -> float:
        return self.prompts_s + self.decodes_s


def late_share(load: PoolLoad, slo: Slo, replicas: int) -> float:
    """Return the share of first tokens that come later than they may. 1.0: the replicas do not
    keep up."""
    left = 1.0 - load.decodes_s / replicas
    if left <= 0 or load.prompts_s >= MOST_BUSY * replicas * left:
        return 1.0
    busy = load.prompts_s / (replicas * left)
    own_s = load.mean_prompt_s / left
    limit_s = slo.first_token_limit_s(load.mean_prompt_s)
    residual_s = max(load.residual_s / left, 1e-9)
    all_busy = busy ** (math.sqrt(2 * (replicas + 1)) - 1) if busy > 0 else 0.0
    wait_s = max(0.0, limit_s - own_s)
    return float(all_busy * math.exp(-wait_s * replicas * (1 - busy) / residual_s))


def replicas_needed(load: PoolLoad, slo: Slo, target: float, most: int) -> int:
    """Return the fewest replicas that meet the objective for a share of `target`, at most `most`;
    0 where nothing comes."""
    if load.work_s <= 0:
        return 0
    first = max(1, math.ceil(load.work_s / (1 - step_share(load, slo)) - 1e-9))
    for replicas in range(first, most):
        if late_share(load, slo, replicas) <= 1 - target:
            return replicas
    return most


def roles_needed(load: PoolLoad, slo: Slo, target: float, most: int) -> tuple[int, int] | None:
    """Return the fewest replicas that compute prompts for others, and of those others, that meet
    the objective together; None: more than `most`, nothing comes, or they cannot read each other's
    prompts in time."""
    decode = decoders_needed(load, slo, most)
    if decode is None:
        return None
    prompts = msgspec.structs.replace(load, decodes_s=0.0)
    for prefill in range(1, most - decode + 1):
        if late_share(prompts, slo, prefill) <= 1 - target:
            return prefill, decode
    return None


def decoders_needed(load: PoolLoad, slo: Slo, most: int) -> int | None:
    """Return the fewest replicas that go on with prompts which others computed, within the
    objective of tokens; None: so many as `most` would not do, or nothing comes."""
    if load.work_s <= 0 or load.transfer is None or load.answer_tokens <= 1:
        return None
    for replicas in range(1, most + 1):
        reading = load.rate * load.transfer.seconds / replicas
        if reading >= MOST_BUSY:
            continue
        waited_s = load.transfer.seconds / (1 - reading)
        left_s = slo.tpot_s - waited_s / (load.answer_tokens - 1)
        if left_s <= load.step_s:
            continue
        if load.decodes_s <= replicas * (1 - min(MOST_STEP_SHARE, load.step_s / left_s)) + 1e-9:
            return replicas
    return None


def step_share(load: PoolLoad, slo: Slo) -> float:
    """Return the part of a replica's time that the fixed seconds of steps are to have left."""
    return min(MOST_STEP_SHARE, load.step_s / slo.tpot_s)

"""Chooses the replica of a model that a request goes to.

Pure. All is weighed in seconds: the predicted time to the first token, as in Mooncake's Algorithm 1
(FAST'25); for each request that decodes there a part of the time by which the prompt would hold it
up; and a part of the work that the replica had lately. Without the last one a prefix that all have
in common draws all requests to where it was computed first, where nothing waits at any decision: it
is the larger the freer the replicas are, as there is time then to compute a prefix once more. Of
those within TIE_S of the best the one with the least recent work is chosen. The parts were found by
simulation (`python -m bench.fleet routers|hot|paced`).

A request stays in its cell unless no engine of its model is up there, or its first token would come
later there than was promised, and as promised or clearly sooner in another cell, the round trip to
that one included.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.fleet.engine_view import RECENT_S, EngineView
from gateway.fleet.fetching import Fetch, Holders

BESIDE_SHARE = 0.03
"""The worth of a second by which a prompt holds up somebody's tokens, beside one of its own."""
RECENT_SHARE, MOST_RECENT_SHARE = 0.02, 1.0
"""The worth of a second of recent work where replicas are busy with prompts all the time; where
they are for a part of it, this over the square of that part."""
TIE_S = 0.002
CLEARLY_SOONER = 0.7
"""The part of the seconds at home within which another cell has to say the first token where both
are late: what is predicted of that one is a round trip older."""

RouteReason = Literal["cached", "least_work", "spread", "key", "split", "cell_down", "cell_late"]
"""Why a replica is first. cached: it is the soonest, and has more of the prompt than another.
least_work: it is the soonest. spread: another is as soon or sooner, where more is held up or more
was done lately. key: the client's key leads there. split: one engine computes the prompt, another
one goes on (`gateway.fleet.roles`). cell_down, cell_late: it is another cell's, as the own one has
no engine up, or would be late."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One replica for one request."""

    predicted_s: float
    """To the first token."""
    cached: int
    """Tokens of the prompt."""
    beside_s: float = 0.0
    """Seconds for which the prompt would hold up others, all of them together."""
    recent_s: float = 0.0
    """Seconds of work that it had lately."""
    fetch: Fetch | None = None
    """The tokens that it reads from another one, where that is sooner than computing them."""

    @property
    def front(self) -> int:
        """Return the tokens that it need not compute."""
        return self.cached if self.fetch is None else self.fetch.front

    def score_s(self, recent_share: float) -> float:
        return self.predicted_s + BESIDE_SHARE * self.beside_s + recent_share * self.recent_s


class Split(msgspec.Struct, frozen=True, gc=False):
    """A prompt that one engine computes for another one, which goes on behind the first token."""

    prefill: int
    decode: int
    """Their positions."""
    transfer_s: float
    """Seconds until the second one has what the first one computed."""


class Choice(msgspec.Struct, frozen=True):
    """Replicas by their positions, the best first."""

    order: tuple[int, ...]
    """Without those of another role than the request's."""
    reason: RouteReason
    candidates: tuple[Candidate, ...]
    """By position."""
    split: Split | None = None
    """Its engine of the prefill pool is the first of the order."""

    @property
    def least_s(self) -> float:
        """Return the least predicted seconds of all in the order."""
        return min([self.candidates[at].predicted_s for at in self.order])


def candidates_of(
    views: Sequence[EngineView],
    num_tokens: int,
    cached: Sequence[int],
    lane: Lane,
    factor: float = 1.0,
    *,
    fetches: bool = True,
) -> list[Candidate]:
    """Predict for each replica. `cached`: tokens of the prompt that each has; the last one is
    always computed. `factor`: corrects the predictions. `fetches`: replicas may read what others
    have."""
    rank, now_s, most = LANE_RANKS[lane], views[0].clock(), max(0, num_tokens - 1)
    holders = Holders(views, cached) if fetches else None
    found = []
    for at, (view, tokens) in enumerate(zip(views, cached, strict=True)):
        price, front = view.price, tokens if tokens < most else most
        fetch = None if holders is None else holders.fetch_for(at, view, num_tokens, front)
        has = front if fetch is None else fetch.front
        own_s = price.own_seconds(num_tokens - has, has)
        seconds = factor * view.predict(own_s, rank, now_s)
        seconds += 0.0 if fetch is None else fetch.seconds
        found.append(Candidate(seconds, front, price.decodes * own_s, view.recent_s, fetch))
    return found


def choose(candidates: Sequence[Candidate], pool: Sequence[int] | None = None) -> Choice:
    """Order replicas; those of a pool alone, if one is named. Those that are alike stay in their
    order."""
    if pool is not None:
        chosen = choose([candidates[at] for at in pool])
        within = tuple(pool[at] for at in chosen.order)
        return Choice(within, chosen.reason, tuple(candidates))
    share = recent_share(candidates)
    scores = [each.score_s(share) for each in candidates]
    order = sorted(range(len(scores)), key=scores.__getitem__)
    tied = bisect_right(order, scores[order[0]] + TIE_S, key=scores.__getitem__)
    if tied > 1:
        alike = sorted(order[:tied])
        alike.sort(key=lambda at: candidates[at].recent_s)
        order[:tied] = alike
    return Choice(tuple(order), reason_of(candidates, order[0]), tuple(candidates))


def reason_of(candidates: Sequence[Candidate], first: int) -> RouteReason:
    found = candidates[first]
    seconds = [each.predicted_s for each in candidates]
    soon_s = max(min(seconds) + TIE_S, found.predicted_s)
    if sum([each <= soon_s for each in seconds]) > 1:
        return "spread"
    return "cached" if found.cached > min([each.cached for each in candidates]) else "least_work"


def lead(choice: Choice, at: int, worth_s: float, latest_s: float | None) -> Choice:
    """Let the replica to which a client's key leads be the first, where that costs no more than
    `worth_s` and is no reason to come later than `latest_s`; None: whenever."""
    first, led = (choice.candidates[each] for each in (choice.order[0], at))
    is_late = latest_s is not None and first.predicted_s <= latest_s < led.predicted_s
    if is_late or led.predicted_s > first.predicted_s + worth_s:
        return choice
    others = (each for each in choice.order if each != at)
    return Choice((at, *others), "key", choice.candidates)


def is_late(soonest_s: float | None, promised_s: float | None) -> bool:
    """Tell whether the first token of a request comes later than was promised. None: nobody knows,
    or nothing was promised."""
    return soonest_s is not None and promised_s is not None and soonest_s > promised_s


def is_better(there_s: float | None, here_s: float | None, promised_s: float | None) -> bool:
    """Tell whether a request leaves its cell, which is late for it. `there_s`, `here_s`: the least
    predicted seconds to its first token; None: nobody knows."""
    if there_s is None or here_s is None:
        return False
    return not is_late(there_s, promised_s) or there_s <= CLEARLY_SOONER * here_s


def before(first: Choice, then: Choice, reason: RouteReason) -> Choice:
    """Return one choice among the replicas of two: all of the first before all of the second."""
    num_first = len(first.candidates)
    shifted = tuple(num_first + at for at in then.order)
    return Choice((*first.order, *shifted), reason, (*first.candidates, *then.candidates))


def with_reason(choice: Choice, reason: RouteReason) -> Choice:
    return msgspec.structs.replace(choice, reason=reason)


def explain(choice: Choice, names: Sequence[str]) -> str:
    """Say why replicas are in this order: of each its number, the predicted seconds, the tokens of
    the prompt that it has cached, if any, and from which other one it would read more. `names`: in
    the order of the choice, `model/number`."""
    said = [str(choice.reason)]
    numbers = {at: name.rpartition("/")[2] for name, at in zip(names, choice.order, strict=False)}
    if (split := choice.split) is not None:
        where = f"prefill at {numbers[split.prefill]} and decode at {numbers[split.decode]}"
        said.append(f"{where} after {split.transfer_s:.3g} s")
    for at, number in numbers.items():
        found = choice.candidates[at]
        text = f"{number} in {found.predicted_s:.3g} s"
        text += f" with {found.cached}" if found.cached else ""
        if found.fetch is not None:
            source = numbers.get(found.fetch.source, "another")
            text += f" and {found.fetch.front - found.cached} of {source}"
        said.append(text)
    return ", ".join(said)


def recent_share(candidates: Sequence[Candidate]) -> float:
    """Return what a second of recent work is worth, by how busy the replicas are."""
    busy = sum(each.recent_s for each in candidates) / (RECENT_S * len(candidates))
    return RECENT_SHARE / max(busy**2, RECENT_SHARE / MOST_RECENT_SHARE)

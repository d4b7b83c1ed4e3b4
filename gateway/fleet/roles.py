"""Decides whether an engine that only computes prompts computes one for an engine that decodes.

Pure. Engines of a model may have roles: some compute prompts and say the first token, the others go
on from the KV that they read of them. That spares those who decode there the steps that the prompt
would share with theirs, and costs the request its transfer: between its first token and the next.
So all are weighed in seconds that somebody waits for a token, by what engines have learnt
(`gateway.fleet.predicted_time`, `gateway.fleet.fetching`): a short prompt, or one whose engine has
nothing else to do, is computed where it decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.fleet.engine_view import EngineView
from gateway.fleet.fetching import can_read, peer_of
from gateway.fleet.routing import Candidate, Choice, Split, choose, reason_of

EXPECTED_TOKENS = 100
"""A request is expected to say so many more behind its first token."""


class Pools(msgspec.Struct, frozen=True):
    """The engines of a model by what they do, by their positions."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]


def pools_of(are_prefill: Sequence[bool]) -> Pools | None:
    """Return the pools of the engines that can be asked; None: there is one pool, and each of its
    engines does both. `are_prefill`: whether each computes prompts for others."""
    prefill = tuple(at for at, is_prefill in enumerate(are_prefill) if is_prefill)
    if not prefill or len(prefill) == len(are_prefill):
        return None
    return Pools(prefill, tuple(at for at, is_prefill in enumerate(are_prefill) if not is_prefill))


def choose_by_role(
    choice: Choice,
    views: Sequence[EngineView],
    pools: Pools,
    num_tokens: int,
    latest_s: float | None = None,
) -> Choice:
    """Let an engine of the prefill pool come first where it is to compute the prompt. `choice`:
    among those that decode; `latest_s`: as in `split_of`."""
    there = choose(choice.candidates, pools.prefill).order[0]
    split = split_of(views, choice.candidates, there, choice.order[0], num_tokens, latest_s)
    if split is None:
        return choice
    return Choice((there, *choice.order), "split", choice.candidates, split)


def choose_to_go_on(
    candidates: Sequence[Candidate], views: Sequence[EngineView], pool: Sequence[int]
) -> Choice:
    """Order engines of a pool for a request whose prompt is computed: by when each says the next
    token, and how long its steps are, for all that follow. What prompts it had lately is no matter:
    that would lead all to one engine, as what is read is no work."""

    def seconds(at: int) -> float:
        return candidates[at].predicted_s + EXPECTED_TOKENS * views[at].price.beside_s

    order = tuple(sorted(pool, key=seconds))
    return Choice(order, reason_of([candidates[at] for at in order], 0), tuple(candidates))


def split_of(
    views: Sequence[EngineView],
    candidates: Sequence[Candidate],
    prefill: int,
    decode: int,
    num_tokens: int,
    latest_s: float | None = None,
) -> Split | None:
    """Return how two engines, the best of either pool, would share a prompt; None: the second
    one computes it as well. `latest_s`: the seconds within which the first token keeps
    what was promised; None: nothing was."""
    here, there, view = candidates[decode], candidates[prefill], views[decode]
    if not holds(views[prefill], num_tokens + 1):
        return None
    price, front = view.price, block_front(view, num_tokens)
    transfer_s = transfer_seconds(views[prefill], view, num_tokens, here.cached)
    if transfer_s is None or front <= here.front:
        return None  # there is nothing to read
    split = Split(prefill, decode, transfer_s)
    if latest_s is not None and (here.predicted_s <= latest_s) != (there.predicted_s <= latest_s):
        return split if there.predicted_s <= latest_s else None
    own_s = price.own_seconds(num_tokens - here.front, here.front)
    if latest_s is None and there.predicted_s > here.predicted_s + own_s:
        return None  # the others' gain would be all its own loss, and nothing bounds that
    spared_s = price.held_up_seconds(num_tokens - here.front, here.front)
    spared_s -= price.held_up_seconds(num_tokens - front, front)
    gained_s = here.predicted_s + price.decodes * spared_s - there.predicted_s
    return split if transfer_s <= gained_s else None


def holds(view: EngineView, num_tokens: int) -> bool:
    """Tell whether an engine's KV cache can hold a sequence of so many tokens."""
    return view.status is not None and num_tokens <= view.status.max_model_len


def transfer_seconds(
    source: EngineView, reader: EngineView, num_tokens: int, cached: int
) -> float | None:
    """Return what it takes an engine that has `cached` tokens of a prompt to read the others of one
    that has computed it, and to compute those behind its last block; None: it cannot."""
    theirs, ours = peer_of(source), peer_of(reader)
    if theirs is None or ours is None or not can_read(ours, theirs):
        return None
    front = block_front(reader, num_tokens)
    read_s = ours.read_s + ours.read_token_s * (front - cached) if front > cached else 0.0
    return read_s + reader.price.own_seconds(num_tokens - front, front)


def block_front(view: EngineView, num_tokens: int) -> int:
    """Return the tokens of a prompt in blocks that can be read; the last one is always computed."""
    size = 1 if view.status is None else view.status.block_size
    return (num_tokens - 1) // size * size

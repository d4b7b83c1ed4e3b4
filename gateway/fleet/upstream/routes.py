"""A model of OpenAI-compatible upstreams as a route: its replicas, each with the room before it."""

from __future__ import annotations

from pathlib import Path

from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Route
from gateway.fleet.slots import SharedSlots
from gateway.fleet.upstream.claim_breaker import ClaimBreaker
from gateway.fleet.upstream.input_estimate import Encode
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.fleet.waiting_room import WaitingRoom
from gateway.home import Home
from gateway.settings.load import Settings, read_secret
from gateway.settings.models import ModelConfig


def upstream_route(model: ModelConfig, threads: PrepareThreads, settings: Settings) -> Route:
    rooms = [room_before(model, position, settings) for position in range(len(model.replicas))]
    encode = None if model.tokenizer is None else load_encode(model.tokenizer)
    replicas = tuple(
        UpstreamReplica(
            name=f"{model.name}/{position}",
            base_url=each.upstream,
            upstream_model=each.upstream_model,
            api_key=None if each.api_key_env is None else read_secret(each.api_key_env),
            weight=each.weight,
            context_window=model.context_window,
            max_output_tokens=model.max_output_tokens,
            max_image_tokens=model.max_image_tokens,
            max_tokens_field=each.max_tokens_field,
            takes_reasoning_effort=each.takes_reasoning_effort,
            encoding=encode,
            room=rooms[position],
            claims=ClaimBreaker(settings.max_disputed_in_a_row, settings.disputed_rest_s),
            threads=threads,
        )
        for position, each in enumerate(model.replicas)
    )
    bounded = tuple(room for room in rooms if room is not None)
    return Route(model=model.name, kind="upstream", replicas=replicas, rooms=bounded)


def room_before(model: ModelConfig, position: int, settings: Settings) -> WaitingRoom | None:
    """Return the waiting room of an upstream that takes only so many requests at once; None where
    it has no such bound. What it takes at once is shared by the gateways of this home: if there is
    but one, with the one that replaces it. It has the same file wherever it stands in the
    configuration."""
    replica = model.replicas[position]
    if replica.max_concurrency is None:
        return None
    share = replica.max_concurrency // settings.workers
    twins = [each for each in model.replicas[:position] if each.account == replica.account]
    path = Home(settings.home).places_of(model.name, *replica.account, len(twins))
    slots = SharedSlots(path, replica.max_concurrency, share=share)
    return WaitingRoom(share, slots=slots)


def load_encode(path: Path) -> Encode:
    """Load a tokenizer. `path`: a tokenizer.json or the folder it is in."""
    from engine.text.tokenizer import Tokenizer

    return Tokenizer.load(path if path.is_dir() else path.parent).encode

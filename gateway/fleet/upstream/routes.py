"""A model of OpenAI-compatible upstreams as a route: its replicas, each with the room before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.router import Route
from gateway.fleet.slots import SharedSlots
from gateway.fleet.upstream.claim_breaker import ClaimBreaker
from gateway.fleet.upstream.input_estimate import Encode
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.fleet.waiting_room import WaitingRoom
from gateway.home import Home
from gateway.settings.load import Settings, read_api_key
from gateway.settings.models import ModelConfig


def upstream_route(
    model: ModelConfig,
    threads: PrepareThreads,
    settings: Settings,
    rooms: Sequence[WaitingRoom | None],
) -> Route:
    """`rooms`: one for each of its replicas, where that has one."""
    encode = None if model.tokenizer is None else load_encode(model.tokenizer)
    replicas = tuple(
        UpstreamReplica(
            name=f"{model.name}/{position}",
            base_url=each.upstream,
            upstream_model=each.upstream_model,
            api_key=read_api_key(each, settings.secret_key_file),
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


class Rooms:
    """The waiting rooms of one process, each before an upstream that takes only so many requests at
    once. What it takes at once is shared by the gateways of this home: if there is but one, with
    the one that replaces it. It has the same file wherever it stands in the configuration, and
    another one for another bound. There is one room for a file, also for a replica and the one that
    replaces it: POSIX locks belong to a process."""

    def __init__(self) -> None:
        self._rooms: dict[Path, WaitingRoom] = {}
        self._uses: Counter[Path] = Counter()

    def take(self, model: ModelConfig, settings: Settings) -> list[WaitingRoom | None]:
        """Return the rooms before the replicas of a model; None before one without a bound. They
        are given back once."""
        return [self._take(path, model, at, settings) for at, path in places_of(model, settings)]

    def give_back(self, model: ModelConfig, settings: Settings) -> None:
        """Close those of a model's rooms that nobody uses any more."""
        for _, path in places_of(model, settings):
            if path is not None:
                self._uses[path] -= 1
                if not self._uses[path]:
                    del self._uses[path]
                    self._rooms.pop(path).close()

    def close(self) -> None:
        for room in self._rooms.values():
            room.close()
        self._rooms.clear()
        self._uses.clear()

    def _take(
        self, path: Path | None, model: ModelConfig, position: int, settings: Settings
    ) -> WaitingRoom | None:
        number = model.replicas[position].max_concurrency
        if path is None or number is None:
            return None
        if path not in self._rooms:
            share = number // settings.workers
            self._rooms[path] = WaitingRoom(share, slots=SharedSlots(path, number, share=share))
        self._uses[path] += 1
        return self._rooms[path]


def places_of(model: ModelConfig, settings: Settings) -> Iterator[tuple[int, Path | None]]:
    """Yield the positions of a model's replicas, and the files of their slots. None: no bound."""
    home = Home(settings.home)
    accounts: list[tuple[str, str, str | None]] = []
    for position, replica in enumerate(model.replicas):
        bound, twins = replica.max_concurrency, accounts.count(replica.account)
        accounts.append(replica.account)
        path = None
        if bound is not None:
            path = home.places_of(model.name, *replica.account, twins, bound)
        yield position, path


def load_encode(path: Path) -> Encode:
    """Load a tokenizer. `path`: a tokenizer.json or the folder it is in."""
    from engine.text.tokenizer import Tokenizer

    return Tokenizer.load(path if path.is_dir() else path.parent).encode

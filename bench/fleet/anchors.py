"""The formulas by which other routers choose, written anew from their documents and sources, to be
compared on the same requests. Each knows what its product knows: statuses as old as they are, what
a router has sent itself, exact caches where the product has events of them.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from bench.fleet.trace import TracedRequest
from bench.fleet.world import NUM_WORKERS, FleetWorld, RequestFate, Router
from bench.sim.world import IDLE
from engine.protocol import ReplicaStatus


class Anchor:
    """Knows what most of them do: statuses, and the truth of caches for those that have events."""

    def __init__(self, world: FleetWorld, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.statuses: list[ReplicaStatus] = [IDLE] * world.setup.num_replicas

    def heard(self, replica: int, status: ReplicaStatus, now_s: float) -> None:
        self.statuses[replica] = status

    def began(self, fate: RequestFate) -> None:
        """Do nothing."""

    def cached_blocks(self, asked: TracedRequest) -> list[int]:
        return [each.cache.cached_blocks(asked.hash_ids) for each in self.world.replicas]

    def least(self, scores: Sequence[float]) -> int:
        """Return one of those with the least, at random."""
        best = min(scores)
        return self.rng.choice([at for at, score in enumerate(scores) if score == best])


class RoundRobin(Anchor):
    """Each worker asks one after the other."""

    def __init__(self, world: FleetWorld, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._next = [rng.randrange(world.setup.num_replicas) for _ in range(NUM_WORKERS)]

    def choose(self, fate: RequestFate, now_s: float) -> int:
        self._next[fate.worker] = (self._next[fate.worker] + 1) % self.world.setup.num_replicas
        return self._next[fate.worker]


class LeastLoaded(Anchor):
    """Tollgate before: requests by the last status, nothing that was sent since."""

    def choose(self, fate: RequestFate, now_s: float) -> int:
        return self.least([each.num_running + each.num_waiting for each in self.statuses])


class BoundedHashing(Anchor):
    """Consistent hashing with bounded loads (arXiv:1608.01350) on the first two blocks, as Tollgate
    does with a client's cache key."""

    def choose(self, fate: RequestFate, now_s: float) -> int:
        asked = fate.asked
        loads = [each.num_running + each.num_waiting for each in self.statuses]
        mean = sum(loads) / len(loads)
        most = mean + max(0.25 * mean, 1.0)
        key = repr(asked.hash_ids[:2]).encode()
        draws = [
            int.from_bytes(blake2b(b"%d" % at, key=key[:64], digest_size=7).digest())
            for at in range(len(loads))
        ]
        ranks = [
            (0.0 if load <= most else load, draw) for load, draw in zip(loads, draws, strict=True)
        ]
        return min(range(len(loads)), key=ranks.__getitem__)


class ApproximateTree(Anchor):
    """SGLang's router: a tree of what one router itself has sent, told of no eviction; where more
    than a share of a prompt matches it goes there, else to the smallest tree; where loads are
    unequal, to the shortest queue."""

    threshold, absolute, relative, most_blocks = 0.3, 64, 1.5, 2**17

    def __init__(self, world: FleetWorld, rng: random.Random) -> None:
        super().__init__(world, rng)
        number = world.setup.num_replicas
        self._trees: list[list[OrderedDict[int, None]]] = [
            [OrderedDict() for _ in range(number)] for _ in range(NUM_WORKERS)
        ]
        self._open = [[0] * number for _ in range(NUM_WORKERS)]

    def choose(self, fate: RequestFate, now_s: float) -> int:
        asked, trees, loads = fate.asked, self._trees[fate.worker], self._open[fate.worker]
        matched = [self._matched(tree, asked) for tree in trees]
        if max(loads) - min(loads) > self.absolute and max(loads) > self.relative * min(loads):
            chosen = self.least(loads)
        elif max(matched) > self.threshold * len(asked.hash_ids):
            chosen = self.least([-each for each in matched])
        else:
            chosen = self.least([len(tree) for tree in trees])
        tree = trees[chosen]
        for block in asked.hash_ids:
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self.most_blocks:
            tree.popitem(last=False)
        loads[chosen] += 1
        return chosen

    def began(self, fate: RequestFate) -> None:
        self._open[fate.worker][fate.replica] -= 1

    def _matched(self, tree: OrderedDict[int, None], asked: TracedRequest) -> int:
        found = 0
        for block in asked.hash_ids:
            if block not in tree:
                break
            found += 1
        return found


class TunedTree(ApproximateTree):
    """The same with the threshold that is best here."""

    threshold = 0.05


class BlockCost(Anchor):
    """Dynamo's KV router: overlap weight x blocks to prefill + blocks in use, of its own and other
    routers' requests, and events of caches."""

    weight = 1.0

    def __init__(self, world: FleetWorld, rng: random.Random) -> None:
        super().__init__(world, rng)
        self._prefill = [0] * world.setup.num_replicas
        self._decode = [0] * world.setup.num_replicas
        self._begun: dict[int, int] = {}

    def choose(self, fate: RequestFate, now_s: float) -> int:
        asked, blocks = fate.asked, len(fate.asked.hash_ids)
        missing = [blocks - found for found in self.cached_blocks(asked)]
        costs = [
            self.weight * (self._prefill[at] + missing[at]) + self._used(at) + blocks
            for at in range(len(missing))
        ]
        chosen = self.least(costs)
        self._prefill[chosen] += missing[chosen]
        self._begun[id(asked)] = missing[chosen]
        return chosen

    def began(self, fate: RequestFate) -> None:
        self._prefill[fate.replica] -= self._begun.pop(id(fate.asked), 0)

    def _used(self, replica: int) -> int:
        return self.world.replicas[replica].cache.num_used


class WeightedScores(Anchor):
    """llm-d's endpoint picker: scores from 0 to 1 of prefix, queue and KV use, weighted 3:2:2, with
    precise prefixes and statuses."""

    def choose(self, fate: RequestFate, now_s: float) -> int:
        asked = fate.asked
        queues = [each.num_waiting for each in self.statuses]
        longest, shortest = max(queues), min(queues)
        found = self.cached_blocks(asked)
        scores = []
        for status, queue, blocks in zip(self.statuses, queues, found, strict=True):
            idle = (longest - queue) / (longest - shortest) if longest > shortest else 1.0
            room = 1 - status.kv_cache_usage
            scores.append(-(3 * blocks / len(asked.hash_ids) + 2 * idle + 2 * room))
        return self.least(scores)


ANCHORS: dict[str, Callable[[FleetWorld, random.Random], Router]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "bounded hashing": BoundedHashing,
    "SGLang tree, 0.3": ApproximateTree,
    "SGLang tree, 0.05": TunedTree,
    "Dynamo cost": BlockCost,
    "llm-d 3:2:2": WeightedScores,
}

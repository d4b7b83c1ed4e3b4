"""Has engines run on the nodes of a Ray cluster, each in an actor that runs `tollgate engine
--join`, and has another one run where an actor or its node is lost.

The engines of a model are asked for together, in one placement group that spreads them over nodes.
Where Ray has no room for all within `TOGETHER_S` each gets a group of its own: those run that fit,
and the others are what Ray's autoscaler hears of. Actors are not detached: Ray ends them and their
groups when this process is gone, however it left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from foundation.tasks import TaskSet, end_tasks
from gateway.fleet.joining.launch_plan import LaunchedModel, LaunchPlan
from gateway.fleet.joining.tokens import JoinTokens, NotJoinable, StoredToken, TooManyTokens
from gateway.processes.launching.engine_actor import EngineActor
from gateway.settings.file import one_line

log = logging.getLogger(__name__)

NAMESPACE = "tollgate"
TOGETHER_S = 30.0
LOOK_S = 0.5
"""How often it is looked whether a group has its room."""
PATIENCE_S = 60.0
"""After how long it is said that Ray has no room for an engine."""
TOKEN_LIFE_S = 4 * 3600
"""An engine shows its token once its weights were fetched to its node, and before it loads them."""
DRAIN_S = 35.0
"""An engine gives what it runs 30 s."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
HEALTHY_AFTER_S = 120.0
"""An engine that was there so long starts the backoff anew."""
EXPECTED = (RayError, NotJoinable, TooManyTokens, OSError)
CREATED, REMOVED = "CREATED", "REMOVED"


class ResourceGroup:
    """A placement group of `size` bundles, for as long as any of them is `held`."""

    def __init__(self, resources: Mapping[str, float], size: int) -> None:
        bundle = {name: amount for name, amount in resources.items() if amount > 0}
        self._group = placement_group([bundle] * size, strategy="SPREAD")
        self._held = size

    async def state(self) -> str:
        found = await asyncio.to_thread(placement_group_table, self._group)
        return str(found.get("state", REMOVED))

    async def is_placed_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while await self.state() != CREATED:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return False
        return True

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )

    def remove(self) -> None:
        remove_placement_group(self._group)

    def release(self) -> None:
        """Give one bundle back; the last one takes the group along."""
        self._held -= 1
        if self._held == 0:
            self.remove()


class LaunchedEngine:
    """One engine: the actor that runs it, and after that is lost another one. `group` and `index`:
    its bundle, if it has one already."""

    def __init__(
        self,
        model: LaunchedModel,
        number: int,
        *,
        tokens: JoinTokens,
        home: str,
        group: ResourceGroup | None,
        index: int,
    ) -> None:
        self.name = f"{model.pool}, engine {number} on Ray"
        self._model, self._tokens, self._home = model, tokens, home
        self._group, self._index = group, index

    async def keep(self) -> None:
        """Keep it running until cancelled; nothing of it is left then."""
        backoff_s, clock = FIRST_BACKOFF_S, asyncio.get_running_loop().time
        try:
            while True:
                began = clock()
                try:
                    reason = await self._run()
                except Exception as error:
                    reason = one_line(str(error)) or type(error).__name__
                    if not isinstance(error, EXPECTED):
                        log.exception("%s: %s", self.name, reason)
                if clock() - began > HEALTHY_AFTER_S:
                    backoff_s = FIRST_BACKOFF_S
                log.warning("%s was lost, another one is asked for: %s", self.name, reason)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            if self._group is not None:
                self._group.release()

    async def _run(self) -> str:
        """Run it in an actor until that is of no use any more, and return why. Raises: RayError,
        NotJoinable, TooManyTokens, OSError."""
        if self._group is None or await self._group.state() == REMOVED:
            self._group, self._index = ResourceGroup(self._model.resources, 1), 0
        actor = self._begin_actor()
        token: StoredToken | None = None
        try:
            host = await self._host_of(actor)
            token, text = self._tokens.draw(self._model.name, uses=1, expires_in_s=TOKEN_LIFE_S)
            self._tokens.keep(token)
            log.info("%s starts on %s, to join by %s", self.name, host, token.id)
            await actor.begin.remote(self._model.arguments, self._home, text)
            return str(await actor.left.remote())
        finally:
            await self._end(actor)
            if token is not None:  # an engine of a lost node that is there after all leaves
                self._tokens.revoke(token)

    def _begin_actor(self) -> Any:
        assert self._group is not None
        wanted = self._model.resources
        own = {name: wanted[name] for name in wanted.keys() - {"CPU", "GPU"} if wanted[name] > 0}
        kind = ray.remote(EngineActor).options(
            num_cpus=wanted["CPU"],
            num_gpus=wanted["GPU"],
            resources=own,
            scheduling_strategy=self._group.bundle(self._index),
            max_restarts=0,  # another one wants another token
        )
        return kind.remote(self.name)

    async def _host_of(self, actor: Any) -> str:
        """Return the node that the actor is on, once it is on one. Raises: RayError."""
        asked = asyncio.ensure_future(_answer(actor.host.remote()))
        try:
            done, _ = await asyncio.wait({asked}, timeout=PATIENCE_S)
            if not done:
                log.warning("%s waits until Ray has room for %s", self.name, self._model.resources)
            return str(await asked)
        finally:
            asked.cancel()

    async def _end(self, actor: Any) -> None:
        """End an actor and its engine; those of a node that is lost are lost already."""
        try:
            async with asyncio.timeout(DRAIN_S + LOOK_S):
                await actor.end.remote(DRAIN_S)
        except (RayError, TimeoutError) as error:
            log.info("%s did not end by itself: %s", self.name, type(error).__name__)
        ray.kill(actor)


class RayLauncher:
    """The engines that one home has on Ray; this process is connected to the cluster. `tokens`: of
    the home."""

    def __init__(self, tokens: JoinTokens) -> None:
        self._tokens = tokens
        self._home = ""
        """The address at which engines find it."""
        self._models: dict[str, LaunchedModel] = {}
        self._engines: dict[str, list[asyncio.Task[None]]] = {}
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()

    async def take_up(self, plan: LaunchPlan) -> None:
        """Take up another plan: engines run on that are to be as they are."""
        home = f"{plan.join_host or get_node_ip_address()}:{plan.join_port}"
        wanted = {each.pool: each for each in plan.models}
        moved, self._home = self._home not in ("", home), home
        for name, before in list(self._models.items()):
            if moved or name not in wanted or not _are_alike(before, wanted[name]):
                await self._end(name, 0)
            elif wanted[name].engines < before.engines:
                await self._end(name, wanted[name].engines)
        for name, model in wanted.items():
            missing = model.engines - len(self._engines.get(name, ()))
            self._models[name] = model
            if missing > 0:
                await self._end_beginning(name)
                self._beginning[name] = self._tasks.spawn(
                    self._begin(model, model.engines), name=f"begin {name}"
                )

    async def close(self) -> None:
        await asyncio.gather(*(self._end(name, 0) for name in list(self._models)))
        await self._tasks.close()

    async def _begin(self, model: LaunchedModel, number: int) -> None:
        """Have `number` engines of a model: those that are missing are placed together, if they
        can be."""
        running = self._engines.setdefault(model.pool, [])
        missing = range(len(running), number)
        group: ResourceGroup | None = ResourceGroup(model.resources, len(missing))
        assert group is not None
        try:
            placed = await group.is_placed_within(TOGETHER_S)
        except BaseException:
            group.remove()
            raise
        if not placed:
            group.remove()
            group = None
            log.warning("Ray has no room for %d engines of %s at once", len(missing), model.pool)
        for index, at in enumerate(missing):
            engine = LaunchedEngine(
                model, at, tokens=self._tokens, home=self._home, group=group, index=index
            )
            running.append(self._tasks.spawn(engine.keep(), name=engine.name))

    async def _end(self, name: str, kept: int) -> None:
        """End the engines of a model but for the first `kept`."""
        await self._end_beginning(name)
        running = self._engines.get(name, [])
        gone, running[kept:] = running[kept:], []
        await end_tasks(*gone, again_s=DRAIN_S + FIRST_BACKOFF_S)
        if kept == 0:
            self._models.pop(name, None)

    async def _end_beginning(self, name: str) -> None:
        beginning = self._beginning.pop(name, None)
        if beginning is not None:
            await end_tasks(beginning)


def connect(cluster: str) -> None:
    """Connect this process to a cluster. Raises: ConnectionError, RuntimeError, ValueError."""
    ray.init(address=cluster, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")


async def _answer(reference: Any) -> Any:
    return await reference


def _are_alike(one: LaunchedModel, other: LaunchedModel) -> bool:
    """Tell whether they differ in their number of engines at the most."""
    return msgspec.structs.replace(one, engines=0) == msgspec.structs.replace(other, engines=0)

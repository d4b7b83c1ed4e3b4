"""Scales the engines of one model that are the pods of a StatefulSet and join this home.

An engine joins from a host that is its pod's name, NAME-0, NAME-1 and so on, and a StatefulSet that
shrinks ends the pods of the highest numbers. So these engines get nothing new first, end what they
run, and only then are fewer wanted. What still runs after that wait has the time that a pod has to
end, and goes on at another engine as after any end of one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.joining.joined_engines import JoinRecord, present_in
from gateway.fleet.planner.scale_api import ScaleApi, ScaleError
from gateway.home import engine_number
from gateway.settings.kubernetes import KubernetesConfig
from gateway.settings.models import ModelConfig

LOOK_EVERY_S = 5.0
"""How often the API is asked how many pods are wanted, which others may change."""
DRAIN_POLL_S = 0.1


class PodPool:
    """The pods of one model. `folder`: that of the home's joining; `is_idle`: whether nothing runs
    at the engine of an address."""

    def __init__(
        self,
        config: KubernetesConfig,
        api: ScaleApi,
        folder: Path,
        marks: DrainMarks,
        is_idle: Callable[[str], bool],
    ) -> None:
        self.config = config
        self.replicas: int | None = None
        """The pods that are wanted, as last told; None: nobody said it yet."""
        self.has_looked = False
        self.problem = ""
        """Why it is not known how many there are."""
        self._api, self._folder, self._marks, self._is_idle = api, folder, marks, is_idle
        self._drained: dict[int, str] = {}
        """The hosts of engines that were marked here, by their numbers."""
        self._looked_at_s = 0.0
        self._turn = asyncio.Lock()

    @property
    def is_due(self) -> bool:
        """Tell whether it is time for another look."""
        aged = time.monotonic() - self._looked_at_s >= LOOK_EVERY_S
        return not self._turn.locked() and (aged or not self.has_looked)

    async def look(self, model: ModelConfig) -> None:
        """Learn how many pods are wanted. Raises nothing that the cluster can be the reason of."""
        async with self._turn:
            self._looked_at_s = time.monotonic()
            try:
                self.replicas = await self._api.replicas()
                self._forget_gone(model)
                self.problem = ""
            except ScaleError as error:
                self.problem = str(error)
            self.has_looked = True

    async def scale(self, model: ModelConfig, before: int, after: int, drain_s: float) -> str:
        """Have `after` pods wanted in the place of `before`; of fewer, once the engines that leave
        have ended what they run, or `drain_s` have passed. Return why it cannot be; empty: it is
        done. Raises nothing that the cluster can be the reason of."""
        async with self._turn:
            try:
                if after < before:
                    await self._shrink(model, before, after, drain_s)
                else:
                    stay = self._pods(model, 0).keys() - self._pods(model, after).keys()
                    await self._api.change(before, after)
                    self._unmark(stay)
            except ScaleError as error:
                return str(error)
            self.replicas, self.problem = after, ""
            return ""

    def release(self) -> None:
        """Take off all marks that were made here: nobody looks after these pods any more."""
        self._unmark({*self._drained})

    async def _shrink(self, model: ModelConfig, before: int, after: int, drain_s: float) -> None:
        """Raises: ScaleError, and no engine is marked then that was not before."""
        await self._api.expect(before)
        leaving = self._pods(model, after)
        fresh = {number: host for number, host in leaving.items() if number not in self._marks}
        for number in fresh:
            self._marks.mark(number)
        self._drained |= fresh
        try:
            await self._until_idle(model, leaving, drain_s)
            await self._api.change(before, after)
        except BaseException:
            self._unmark({*fresh})
            raise

    async def _until_idle(self, model: ModelConfig, leaving: Mapping[int, str], s: float) -> None:
        addresses = [each for each in model.joined if engine_number(each) in leaving]
        deadline = time.monotonic() + s
        while time.monotonic() < deadline and not all(map(self._is_idle, addresses)):
            await asyncio.sleep(DRAIN_POLL_S)

    def _pods(self, model: ModelConfig, first: int) -> dict[int, str]:
        """Return the hosts of engines that joined from pods of the number `first` or a higher one,
        by the engines' numbers. Raises: ScaleError."""
        name = re.compile(rf"{re.escape(self.config.stateful_set)}-([0-9]+)")
        found = {}
        for number, record in self._present(model).items():
            pod = name.fullmatch(record.host.partition(".")[0])
            if pod is not None and int(pod[1]) >= first:
                found[number] = record.host
        return found

    def _present(self, model: ModelConfig) -> dict[int, JoinRecord]:
        """Raises: ScaleError."""
        try:
            present = present_in(self._folder)
        except (OSError, msgspec.MsgspecError) as error:
            raise ScaleError(f"it cannot be read who has joined: {error}") from None
        names = {model.replica_name(each): engine_number(each) for each in model.joined}
        return {names[each]: record for each, record in present.items() if each in names}

    def _forget_gone(self, model: ModelConfig) -> None:
        """Take the marks off of places whose engines have left: the next one there is another.
        Raises: ScaleError."""
        if self._drained:
            present = self._present(model)
            hosts = {number: record.host for number, record in present.items()}
            gone = {each for each, host in self._drained.items() if hosts.get(each) != host}
            self._unmark(gone)

    def _unmark(self, numbers: set[int]) -> None:
        for number in numbers & self._drained.keys():
            self._marks.remove(number)
            del self._drained[number]

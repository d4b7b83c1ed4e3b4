"""Puts settings in force that were read anew: all of them or none, while everything serves.

What they name is checked first, and engines that they want are ready beside the old ones, before
anything changes. Then plans and prices, then the workers, all of them, then what nobody wants any
more ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sized
from functools import partial

import msgspec

from billing.errors import BillingError
from engine.errors import ConfigError
from gateway.fleet.planner.scaling import PutInForce, ScalingError
from gateway.installation.model_versions import ModelVersion, VersionHistory
from gateway.processes.control_socket import ReloadAnswer, ReloadRequest, Tell
from gateway.processes.engine_set import (
    OUTDATED,
    EngineSet,
    RunningEngine,
    StartOutdated,
    can_grow_by,
)
from gateway.processes.restarter import StartError
from gateway.processes.worker_set import SettingsRefused, WorkerSet
from gateway.settings.changes import SettingChange, changes_between, needs_new_workers
from gateway.settings.file import SettingsError, one_line
from gateway.settings.load import SecretMissing, Settings
from gateway.settings.models import ModelConfig

log = logging.getLogger(__name__)

ReadSettings = Callable[[], Settings]
"""Reads and checks the settings, with a folder for every model. Blocks. Raises: SettingsError,
OSError."""
Complete = Callable[[Settings], Awaitable[Settings]]
"""Adds what is stored in Postgres to settings that were read. Raises: SettingsError, OSError,
SQLAlchemyError."""
ALL_NEW = "All workers are new."
REFUSED = "Refused, the old settings stay in force: "


class Reload:
    """Reloads the settings of one `tollgate up`, one at a time. `settings`: those in force, which
    know the stores that run. `as_read`: the same as they were read. `in_force`: is called with
    those that came into force."""

    def __init__(
        self,
        read: ReadSettings,
        complete: Complete,
        *,
        as_read: Settings,
        settings: Settings,
        engines: EngineSet,
        workers: WorkerSet,
        say: Callable[[str], None],
        in_force: Callable[[Settings], None] = lambda settings: None,
    ) -> None:
        self.settings = settings
        self.problem = ""
        """Why the last settings are not in force; empty: they are."""
        self.on_outcome: Callable[[str], None] = lambda problem: None
        """Called with `problem` when settings were reloaded or refused."""
        self._as_read, self._read, self._complete = as_read, read, complete
        self._engines, self._workers, self._say = engines, workers, say
        self._in_force = in_force
        self._elsewhere = VersionHistory()
        self._counts: Mapping[str, int] = {}
        """How many engines models have by decision, in place of what they begin with."""
        self._wakes_in_s: Mapping[str, float | None] = {}
        self._turn = asyncio.Lock()

    def versions(self) -> list[ModelVersion]:
        """Return the versions of all models: those in force, and those that come and go."""
        elsewhere = (each for each in self.settings.models if not each.starts_engine)
        return [*self._engines.versions(), *self._elsewhere.of(elsewhere)]

    async def answer(self, request: ReloadRequest, tell: Tell = lambda line: None) -> ReloadAnswer:
        """Reload, and say what came of it; `tell` shows whoever asked what takes its time. Raises
        nothing that settings can be the reason of."""

        def say(line: str) -> None:
            self._say(line)
            tell(line)

        async with self._turn:
            try:
                found = await self._reload(request, say)
            except (SettingsError, SettingsRefused, StartError, ConfigError, OSError) as error:
                found = refused(error)
            except Exception as error:
                if not is_about_stores(error):
                    log.exception("settings are not reloaded")
                found = refused(error)
        if not request.is_dry_run:
            self.problem = found.message.removeprefix(REFUSED) if found.is_refused else ""
            self.on_outcome(self.problem)
        for line in (*found.changes, found.message):
            self._say(line)
        return found

    async def start(self, model: str) -> PutInForce:
        """Start one more engine of a model whose range lets it, beside all else that goes on, and
        return once it is ready. Broken off, nothing is left of it. Raises: ScalingError, and
        nothing is left of it."""
        found = self._in_force_of(model)
        try:
            engine = await self._engines.begin_beside(found, self.settings)
        except (StartError, OSError) as error:
            raise ScalingError(one_line(str(error))) from None
        began = time.monotonic()
        self._say(f"Starting one more engine of {model} beside what serves.")
        try:
            await self._engines.until_ready([engine])
        except StartError as error:
            is_outdated = isinstance(error, StartOutdated)
            await self._engines.drop([engine], "" if is_outdated else str(error))
            raise ScalingError(one_line(str(error)), is_outdated=is_outdated) from None
        except BaseException:
            await self._engines.drop([engine])
            raise
        self._say(f"Ready: {model}, after {time.monotonic() - began:.1f} s.")
        return partial(self._put_in_force, engine)

    async def _put_in_force(self, engine: RunningEngine) -> None:
        """Raises: ScalingError, and the engine ends then."""
        name = engine.model.name
        try:
            await self._turn.acquire()
        except BaseException:
            await self._engines.drop([engine])
            raise
        try:
            model = next((each for each in self.settings.models if each.name == name), None)
            if engine.is_outdated or model is None or not can_grow_by(model, engine.model):
                await self._engines.drop([engine])
                raise ScalingError(OUTDATED, is_outdated=True)
            self._engines.take(engine)
            await self._take_up_count(name, len(model.started) + 1, None)
        finally:
            self._turn.release()

    async def shrink(self, model: str, number: int, wakes_in_s: float | None) -> None:
        """Have no more than so many engines of a model whose range lets it; the settings stay as
        they are. `wakes_in_s`: how long a start takes, where none is left. Raises: ScalingError,
        and all is as it was."""
        async with self._turn:
            if number < len(self._in_force_of(model).started):
                await self._take_up_count(model, number, wakes_in_s)

    def _in_force_of(self, name: str) -> ModelConfig:
        """Return a model that has a range of engines. Raises: ScalingError."""
        for each in self.settings.models:
            if each.name == name and each.replica_range is not None:
                return each
        raise ScalingError(f"{name} has no range of replicas any more", is_outdated=True)

    async def _take_up_count(self, model: str, number: int, wakes_in_s: float | None) -> None:
        """Have so many of a model's engines, which all run, asked by the workers. Raises:
        ScalingError; all is as it was then, and an engine that is left over ends."""
        counts, wakes = self._counts, self._wakes_in_s
        self._counts = {**counts, model: number}
        self._wakes_in_s = {**wakes, model: wakes_in_s}
        try:
            models = self._engines.place(self._sized(self.settings.models))
            fresh = msgspec.structs.replace(self.settings, models=models)
            await self._workers.take_up(fresh)
        except BaseException as error:
            self._counts, self._wakes_in_s = counts, wakes
            self._retire_engines(self.settings)
            if isinstance(error, SettingsRefused | OSError):
                raise ScalingError(one_line(str(error) or type(error).__name__)) from None
            raise
        self._engines.watch(fresh.models)
        self._retire_engines(fresh)
        self.settings = fresh
        self._as_read = msgspec.structs.replace(self._as_read, models=models)

    def _sized(self, models: Iterable[ModelConfig]) -> tuple[ModelConfig, ...]:
        """Return models with as many engines as were decided; others as they are."""
        sized = []
        for model in models:
            number = self._counts.get(model.name)
            if model.replica_range is not None and number is not None:
                model = model.sized(number)
                wakes_in_s = self._wakes_in_s.get(model.name) if model.is_asleep else None
                model = msgspec.structs.replace(model, wakes_in_s=wakes_in_s)
            sized.append(model)
        return tuple(sized)

    async def _reload(self, request: ReloadRequest, say: Tell) -> ReloadAnswer:
        read = await self._complete(await asyncio.to_thread(self._read))
        models = self._engines.place(self._sized(read.models))
        wanted = msgspec.structs.replace(read, models=models)
        changes = changes_between(self._as_read, wanted)
        lines = [str(each) for each in changes]
        refuse_what_binds(changes)
        fresh = msgspec.structs.replace(
            wanted, database_url=self.settings.database_url, redis_url=self.settings.redis_url
        )
        if request.is_dry_run:
            added = await self._take_up_plans_and_prices(fresh, lines, keeps=False)
            return ReloadAnswer(changes=lines, message=would(changes, added))
        stopped = await self._stop_engines(fresh, lines, say) if request.stops_first else []
        try:
            await self._engines.let_join(fresh)
            await self._start_engines(fresh, say)
            added = await self._take_up_plans_and_prices(fresh, lines)
            await self._have_workers_take_up(fresh, request, lines, say)
        except BaseException as error:
            self._retire_engines(self.settings)
            await self._engines.let_join(self.settings)
            if stopped and isinstance(error, Exception):
                await self._bring_back(stopped, say)
            raise
        self._engines.watch(fresh.models)
        gone = self._retire_engines(fresh)
        replaced = self._is_for_new_workers(fresh, request)
        self.settings, self._as_read = fresh, wanted
        self._in_force(fresh)
        return ReloadAnswer(changes=lines, message=done(changes, added, gone, replaced=replaced))

    async def _stop_engines(self, fresh: Settings, lines: list[str], say: Tell) -> list[str]:
        """Stop the engines that will be replaced; the rest of the settings is tried before. Raises:
        what `database.take_up` raises."""
        await self._take_up_plans_and_prices(fresh, lines, keeps=False)
        say("Stopping engines that are replaced, once their streams have ended.")
        return await self._engines.stop_unwanted(fresh.models)

    async def _bring_back(self, stopped: list[str], say: Tell) -> None:
        """Have the engines run again that were stopped; each is tried until it does."""
        names = each_once(stopped)
        say(f"Starting the old {of_engines(stopped)} of {names} again.")
        back = await self._engines.begin(self.settings)
        self._engines.watch(self.settings.models)
        try:
            await self._engines.until_ready(back)
        except StartError as error:
            say(f"Not ready, and tried again: {error}")

    async def _start_engines(self, fresh: Settings, say: Tell) -> None:
        """Raises: StartError, with the reason that an engine gives, and nothing is left of any."""
        self._engines.forget_failures()
        started = await self._engines.begin(fresh)
        try:
            if started:
                names = each_once(each.model.name for each in started)
                say(f"Starting the {of_engines(started)} of {names} beside what serves.")
                began = time.monotonic()
                await self._engines.until_ready(started)
                say(f"Ready: {names}, after {time.monotonic() - began:.1f} s.")
        except BaseException as error:
            await self._engines.drop(started, str(error) if isinstance(error, StartError) else "")
            raise

    def _retire_engines(self, wanted: Settings) -> list[str]:
        return self._engines.retire(wanted.models, lambda: self._workers.engines_in_use)

    async def _take_up_plans_and_prices(
        self,
        fresh: Settings,
        lines: list[str],
        *,
        keeps: bool = True,
        is_taken_back: bool = False,
    ) -> int:
        from gateway.processes import database  # SQLAlchemy: loaded by the start already

        assert fresh.database_url is not None and fresh.redis_url is not None
        return await database.take_up(
            fresh,
            fresh.database_url,
            fresh.redis_url,
            changes=lines,
            keeps=keeps,
            is_taken_back=is_taken_back,
        )

    async def _have_workers_take_up(
        self, fresh: Settings, request: ReloadRequest, lines: list[str], say: Tell
    ) -> None:
        """Raises: SettingsRefused; the old settings are in force then, also of plans."""
        try:
            if self._is_for_new_workers(fresh, request):
                await self._workers.replace(fresh, say)
            else:
                await self._workers.take_up(fresh)
        except SettingsRefused:
            await self._take_back_plans(lines)
            raise

    async def _take_back_plans(self, lines: list[str]) -> None:
        """Have the plans before in force again. Prices that came stay: nobody uses them yet."""
        if not lines:
            return
        try:
            await self._take_up_plans_and_prices(self.settings, ["taken back"], is_taken_back=True)
        except Exception:
            log.exception("plans of the refused settings stay until the next reload")

    def _is_for_new_workers(self, fresh: Settings, request: ReloadRequest) -> bool:
        return request.replaces_workers or needs_new_workers(self.settings, fresh)


def refuse_what_binds(changes: tuple[SettingChange, ...]) -> None:
    """Raises: SettingsError, for what a reload cannot change."""
    bound = [str(each)[2:] for each in changes if each.effect == "restart"]
    if bound:
        raise SettingsError(f"only a restart of `tollgate up` changes {'; '.join(bound)}")


def is_about_stores(error: Exception) -> bool:
    """Tell whether a store or what stands in it is the reason: known errors, told in a line."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.tenancy.errors import TenancyError

    return isinstance(error, SQLAlchemyError | TenancyError | BillingError)


def refused(error: Exception) -> ReloadAnswer:
    reason = one_line(str(getattr(error, "orig", None) or error) or type(error).__name__)
    if isinstance(error, SecretMissing):
        reason += (
            ". `tollgate up` has the variables that it was started with; an api_key_file is read "
            "at each reload"
        )
    return ReloadAnswer(is_refused=True, message=f"{REFUSED}{reason}")


def would(changes: tuple[SettingChange, ...], num_prices: int) -> str:
    if not changes and not num_prices:
        return "Nothing would change."
    kinds = {each.effect for each in changes}
    how = "by new workers" if "workers" in kinds else "at once"
    prices = f", and {num_prices} new {'price' if num_prices == 1 else 'prices'}"
    what = count(changes, "setting", "settings")
    return f"{what} would change {how}{prices if num_prices else ''}."


def done(
    changes: tuple[SettingChange, ...], num_prices: int, gone: list[str], *, replaced: bool
) -> str:
    parts = []
    if changes:
        parts.append(f"{count(changes, 'setting has', 'settings have')} changed.")
    if num_prices:
        parts.append(f"{num_prices} new {'price' if num_prices == 1 else 'prices'}.")
    if gone:
        end = (
            "engine of {} ends when it is" if len(gone) == 1 else "engines of {} end when they are"
        )
        parts.append(f"The old {end.format(each_once(gone))} done.")
    if not parts:
        parts.append("No setting has changed.")
    parts.append(ALL_NEW if replaced else "All workers have these settings.")
    return " ".join(parts)


def each_once(names: Iterable[str]) -> str:
    """Return names for a sentence: a model with several engines has its name there once."""
    return ", ".join(dict.fromkeys(names))


def count(things: Sized, one: str, several: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else several}"


def of_engines(started: Sized) -> str:
    return "engine" if len(started) == 1 else "engines"

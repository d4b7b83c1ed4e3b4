"""Two homes on the loopback that lend each other engines without a model: one cell's engine listens
on its socket, and a lender brings it to the relay of the other one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from engine.fake.engine import FakeCore
from engine.transport.join_messages import options_of
from engine.transport.server import EngineServer
from gateway.fleet.cells.lending import EngineLender
from gateway.fleet.cells.lending_plan import Borrower, LendingConfig, LentModel
from gateway.fleet.joining.admission import JoinConfig, JoinPlace
from gateway.home import engine_number
from tests.gateway.fleet.joining.home_of_engines import CONFIG, MODEL, WAIT_S, JoinableHome

LENDING_CELL = "us-1"


class BorrowingHome(JoinableHome):
    """A home with places for engines of another cell."""

    def __init__(self, folder: Path, num_places: int = 1) -> None:
        super().__init__(folder, roles=())
        places = tuple(
            JoinPlace(
                replica=f"{MODEL}/{LENDING_CELL}:{2000 + at}",
                address=f"unix:{folder}/engine-{2000 + at}.sock",
                cell=LENDING_CELL,
            )
            for at in range(num_places)
        )
        self.addresses = [each.address for each in places]
        self.numbers = [engine_number(each) for each in self.addresses]
        self.model = msgspec.structs.replace(self.model, places=places)
        self.round_trips = folder / "round_trips"

    def config(self, **changes: object) -> JoinConfig:
        found = super().config(**changes)
        return msgspec.structs.replace(found, round_trips=self.round_trips)

    def cell_token(self, uses: int = 1) -> str:
        self.tokens.cells = lambda: (LENDING_CELL,)
        stored, text = self.tokens.draw_for_cell(LENDING_CELL, uses=uses, expires_in_s=3600)
        self.tokens.keep(stored)
        return text


class LendingHome:
    """The engines of another home, and what lends them. `model_folder`: its copy of the model."""

    def __init__(self, folder: Path, model_folder: Path, num_engines: int = 1) -> None:
        folder.mkdir(parents=True)
        self.folder, self.model_folder = folder, model_folder
        self.addresses = [f"unix:{folder}/engine-{at}.sock" for at in range(num_engines)]
        self.engines: dict[int, tuple[EngineServer, asyncio.Task[None], asyncio.Event]] = {}
        self.lender = EngineLender(folder / "lending")
        self.token_file = folder / "token"

    def begin_engine(self, at: int = 0) -> None:
        server, stop = EngineServer(FakeCore(CONFIG), self.addresses[at]), asyncio.Event()
        serving = asyncio.create_task(server.serve(stop, drain_timeout_s=WAIT_S))
        self.engines[at] = server, serving, stop

    async def end_engine(self, at: int = 0) -> None:
        """End it at once, with all that runs on it."""
        _, serving, _ = self.engines.pop(at)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    def config(self, borrower: BorrowingHome) -> LendingConfig:
        model = LentModel(
            name=MODEL,
            folders={"model": self.model_folder},
            options=options_of(borrower.model.options),
            addresses=tuple(self.addresses),
        )
        to = Borrower(cell="eu-1", address=str(borrower.address), token_file=self.token_file)
        return LendingConfig(models=(model,), borrowers=(to,))

    async def lend_to(self, borrower: BorrowingHome) -> None:
        await self.lender.take_up(self.config(borrower))

    async def close(self) -> None:
        await self.lender.close()
        for at in [*self.engines]:
            await self.end_engine(at)

"""Runs the lender: `python -m gateway lend --folder PATH --config PATH`.

It lends the engines of this home to other cells: each of them joins the home of another cell as an
engine of another machine does (`engine.transport.joining`), and what comes from there goes to the
engine's socket here.

Only engines of this home are lent, never those that others lend to it: a request that went to
another cell goes nowhere else from there. Who is asked, limited and billed is a matter of the cell
that borrows; here an engine has one gateway more, whose requests wait in their lanes beside the
home's own. SIGHUP: the file of settings is read again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

import uvloop

from engine.errors import ConfigError
from engine.model_files import contents_of
from engine.protocol import PROTOCOL_VERSION
from engine.transport.frames import TcpAddress, open_connection, parse_address
from engine.transport.join_identity import JoinIdentity
from engine.transport.join_messages import EngineIdentity
from engine.transport.joining import JoinedEntrance, UnknownIdentity
from foundation import logs
from foundation.tasks import TaskSet
from gateway.fleet.cells.lending_plan import LendingConfig, Loan, loans_of, read_lending
from gateway.fleet.joining.relay import Connection, splice

log = logging.getLogger(__name__)

RETRY_S = 60.0
"""After a refusal that only a person can mend."""
LOOK_S = 0.25
"""How often it is looked whether an engine that is being started listens."""


class EngineLender:
    """Keeps all loans of a home. `folder`: what it keeps of them."""

    def __init__(self, folder: Path) -> None:
        """Raises: OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lent: dict[str, tuple[Loan, asyncio.Task[None]]] = {}
        """By their names."""
        self._tasks = TaskSet()

    async def take_up(self, config: LendingConfig) -> None:
        """Lend what other settings want; loans that they want as well go on."""
        wanted = {each.name: each for each in loans_of(config)}
        gone = [name for name, (loan, _) in self._lent.items() if wanted.get(name) != loan]
        ended = [self._lent.pop(name)[1] for name in gone]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        for name, loan in wanted.items():
            if name not in self._lent:
                lending = self._tasks.spawn(self._lend(loan), name=f"lend {name}")
                self._lent[name] = loan, lending

    async def close(self) -> None:
        await self._tasks.close()
        self._lent.clear()

    async def _lend(self, loan: Loan) -> None:
        """Lend an engine until cancelled."""
        told = ""
        while True:
            reason = await self._refusal_of(loan)
            if reason != told:
                log.error("%s is not lent to %s: %s", loan.model.name, loan.borrower.cell, reason)
                told = reason
            await asyncio.sleep(RETRY_S)

    async def _refusal_of(self, loan: Loan) -> str:
        """Lend an engine for as long as its borrower wants it, and return why that ended."""
        try:
            refusal = await self._lend_as(loan, self._identity_of(loan))
            if isinstance(refusal, UnknownIdentity) and loan.borrower.token_file.exists():
                # Its token was revoked, and there may be another one.
                refusal = await self._lend_as(loan, self._identity_of(loan, begins_anew=True))
            return refusal.message
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        except ConfigError as error:
            return error.message

    def _identity_of(self, loan: Loan, *, begins_anew: bool = False) -> JoinIdentity:
        """Raises: ConfigError, as `JoinIdentity`."""
        return JoinIdentity(
            self._folder / loan.name,
            loan.borrower.token_file,
            token_name="token_file",
            begins_anew=begins_anew,
        )

    async def _lend_as(self, loan: Loan, identity: JoinIdentity) -> ConfigError:
        """Lend an engine that is known by an identity, which is released then, and return why that
        ended. Raises: OSError, ConfigError."""
        model = loan.model
        try:
            files = await asyncio.to_thread(contents_of, model.folders, self._folder / "files.json")
        except BaseException:
            identity.release()
            raise
        refused: asyncio.Future[ConfigError] = asyncio.get_running_loop().create_future()
        said = EngineIdentity(
            protocol_version=PROTOCOL_VERSION, model=model.name, files=files, options=model.options
        )
        home = parse_address(loan.borrower.address)
        assert isinstance(home, TcpAddress)
        entrance = JoinedEntrance(home, identity, said)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await serve_at(loan.address, (reader, writer))

        def refuse(error: ConfigError) -> None:
            if not refused.done():
                refused.set_result(error)

        await entrance.open(serve, refuse)
        try:
            return await refused
        finally:
            await entrance.close()


async def serve_at(address: str, there: Connection) -> None:
    """Pass what a gateway of another cell says to an engine here, once that listens, and what the
    engine says back. Returns when either has ended it."""
    try:
        while True:
            try:
                here = await open_connection(address)
                break
            except OSError:
                if there[0].at_eof():
                    return
                await asyncio.sleep(LOOK_S)
        await splice(here, there)
    finally:
        there[1].close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway lend")
    for name in ("--folder", "--config"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", choices=("json", "human"), default="human")
    arguments = parser.parse_args(sys.argv[2:])
    logs.configure(arguments.log_level, json_lines=arguments.log_format == "json", process="lend")
    with contextlib.suppress(asyncio.CancelledError):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    """Lend until stopped."""
    running, again = asyncio.current_task(), asyncio.Event()
    assert running is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    lender = EngineLender(arguments.folder)
    try:
        while True:
            await lender.take_up(read_lending(arguments.config))
            await again.wait()
            again.clear()
    finally:
        await lender.close()

"""Engines that one cell lends to another: they serve there over TLS, come back by themselves, and
are refused by one line that says why."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.errors import ConfigError, EngineUnavailable
from engine.model_files import contents_of
from engine.protocol import PROTOCOL_VERSION
from engine.transport.client import EngineClient
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.join_identity import JoinIdentity
from engine.transport.join_messages import (
    EngineIdentity,
    FileAnswer,
    FileRange,
    FileRefusal,
    FileRequest,
    options_of,
)
from engine.transport.joining import JoinedEntrance
from gateway.fleet.cells import lending
from gateway.fleet.joining.round_trips import RoundTrips
from gateway.fleet.joining.tokens import NotJoinable
from tests.gateway.fleet.cells.two_homes import BorrowingHome, LendingHome
from tests.gateway.fleet.joining.home_of_engines import (
    MODEL,
    WAIT_S,
    generate,
    request,
    rest_of,
    until,
)
from tests.scratch import scratch_for_a_while


@pytest_asyncio.fixture
async def borrower() -> AsyncIterator[BorrowingHome]:
    with scratch_for_a_while() as folder:
        made = BorrowingHome(Path(folder) / "eu")
        await made.begin()
        yield made
        await made.close()


@pytest_asyncio.fixture
async def lender(borrower: BorrowingHome) -> AsyncIterator[LendingHome]:
    made = LendingHome(borrower.folder.parent / "us", borrower.model_folder)
    made.token_file.write_text(borrower.cell_token())
    yield made
    await made.close()


@pytest_asyncio.fixture
async def client(borrower: BorrowingHome) -> AsyncIterator[EngineClient]:
    """Yield the client that a gateway process of the borrowing cell has."""
    made = EngineClient(borrower.addresses[0])
    made.start()
    yield made
    await made.close()


async def test_a_lent_engine_serves_both_cells_and_is_known_by_its_cell(
    borrower: BorrowingHome, lender: LendingHome, client: EngineClient
) -> None:
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    at_home = await EngineClient.connect(lender.addresses[0], timeout_s=WAIT_S)
    there, here = await asyncio.gather(generate(client), generate(at_home))
    assert there == here and len(there) == 3
    await at_home.close()
    assert borrower.relay is not None
    ((replica, record),) = borrower.relay.joined.items()
    assert (replica, record.cell, record.model) == ("penny/us-1:2000", "us-1", "penny")
    trips = RoundTrips(borrower.round_trips)
    assert 0 < trips.of(borrower.numbers[0]) < 1
    trips.close()


async def test_an_engine_that_dies_ends_its_streams_there_and_comes_back(
    borrower: BorrowingHome, lender: LendingHome, client: EngineClient
) -> None:
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(4000))
    await anext(stream)
    await lender.end_engine()
    with pytest.raises(EngineUnavailable):
        await rest_of(stream)
    lender.begin_engine()
    await client.wait_connected(WAIT_S)
    assert len(await generate(client)) == 3


async def test_an_abort_reaches_the_engine_of_the_other_cell(
    borrower: BorrowingHome, lender: LendingHome, client: EngineClient
) -> None:
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    stream = client.generate(request(4000))
    await anext(stream)
    server = lender.engines[0][0]
    assert len(server._live) == 1
    await stream.aclose()
    await until(lambda: not server._live)


async def test_a_lender_that_begins_again_is_known_without_its_token(
    borrower: BorrowingHome, lender: LendingHome, client: EngineClient
) -> None:
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    lender.token_file.unlink()
    await lender.lender.close()
    await until(lambda: not client.connected)
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    assert len(await generate(client)) == 3


async def test_another_token_is_taken_up_where_the_first_was_revoked(
    borrower: BorrowingHome,
    lender: LendingHome,
    client: EngineClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(lending, "RETRY_S", 0.05)
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    (token,) = borrower.tokens.all()
    borrower.tokens.revoke(token)
    assert borrower.relay is not None
    await borrower.relay._end_revoked()
    await until(lambda: f"penny is not lent to eu-1: token {token.id} was revoked" in caplog.text)
    lender.token_file.write_text(borrower.cell_token())
    await client.wait_connected(WAIT_S)
    assert len(await generate(client)) == 3


async def test_a_loan_reads_no_files_of_the_cell_that_borrows(
    borrower: BorrowingHome, lender: LendingHome
) -> None:
    assert borrower.relay is not None
    await borrower.relay.take_up(msgspec.structs.replace(borrower.config(), bytes_per_s=10**12))
    kept = JoinIdentity(lender.folder / "thief", lender.token_file)
    said = EngineIdentity(
        protocol_version=PROTOCOL_VERSION,
        model=MODEL,
        files=contents_of({"model": borrower.model_folder}, lender.folder / "files.json"),
        options=options_of(borrower.model.options),
    )
    entrance = JoinedEntrance(borrower.address, kept, said)
    await entrance.ask()
    with pytest.raises(ConfigError, match="has its files there"):
        await entrance.ask_for_files(waits=True)
    reader, writer = await entrance.dial()
    content = (borrower.model_folder / "config.json").read_bytes()
    asked = FileRequest(sha256=hashlib.sha256(content).hexdigest(), start=0, size=1)
    writer.write(encode_frame(asked))
    answer = await FrameReader[FileRange | FileRefusal](reader, FileAnswer).read()
    assert answer == FileRefusal(reason="this engine may not read it", is_final=True)
    writer.transport.abort()
    await entrance.close()


async def test_other_settings_end_a_loan(
    borrower: BorrowingHome, lender: LendingHome, client: EngineClient
) -> None:
    lender.begin_engine()
    await lender.lend_to(borrower)
    await client.wait_connected(WAIT_S)
    config = lender.config(borrower)
    await lender.lender.take_up(type(config)(models=config.models, borrowers=()))
    await until(lambda: not client.connected)


def has_no_token(borrower: BorrowingHome, lender: LendingHome) -> None:
    lender.token_file.unlink()


def has_another_file(borrower: BorrowingHome, lender: LendingHome) -> None:
    lender.token_file.write_text("x")


def is_another_cell(borrower: BorrowingHome, lender: LendingHome) -> None:
    assert borrower.relay is not None
    for place in borrower.relay._places.values():
        place.cell = "asia"


def has_another_model(borrower: BorrowingHome, lender: LendingHome) -> None:
    lender.model_folder = lender.folder / "other"
    lender.model_folder.mkdir()
    (lender.model_folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (has_no_token, "token_file {folder}/token: No such file or directory"),
        (has_another_file, "not a token to join with"),
        (is_another_cell, "this cell borrows no engine of penny from us-1"),
        (has_another_model, "config.json of penny is another one there"),
    ],
)
async def test_a_refusal_is_one_line(
    borrower: BorrowingHome,
    lender: LendingHome,
    spoil: Callable[[BorrowingHome, LendingHome], None],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(borrower, lender)
    with caplog.at_level(logging.ERROR):
        await lender.lend_to(borrower)
        await until(lambda: "is not lent to" in caplog.text)
    (line,) = [each.message for each in caplog.records if "is not lent to" in each.message]
    assert line.startswith("penny is not lent to eu-1: ") and "\n" not in line
    assert told.format(folder=lender.folder) in line


def test_a_token_is_for_a_cell_that_may_lend(borrower: BorrowingHome) -> None:
    with pytest.raises(NotJoinable, match="borrow`; no cell does") as found:
        borrower.tokens.draw_for_cell("us-1", uses=1, expires_in_s=60)
    assert found.value.field == "cell"

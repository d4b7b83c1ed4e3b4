"""Engines that join without their model's files fetch them from the home, or from another engine
that joined, and from the source where these lack them, lie or die."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.__main__ import _arguments, _entrance_to, _fetch_from_peers
from engine.errors import ConfigError, ProtocolError
from engine.model_cache.listings import ListedFile, ModelListing
from engine.model_cache.sources import parse_source
from engine.model_files import version_of
from engine.text import hub_weights
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.join_identity import JoinIdentity
from engine.transport.join_messages import (
    MAX_RANGE_BYTES,
    FileAnswer,
    FileRange,
    FileRefusal,
    FileRequest,
    ModelOffer,
)
from engine.transport.joining import (
    JoinedEntrance,
    folders_of,
    identity_of,
    identity_without_files,
)
from engine.transport.peer_files import BroughtModel, ModelFetch
from gateway.fleet.joining import weights
from gateway.fleet.joining.admission import JoinableModel
from gateway.fleet.joining.weights import ByteRate
from tests.engine.model_cache.remote import FILES, SOURCE, Remote, cache_of, tell
from tests.gateway.fleet.joining.home_of_engines import (
    CONFIG,
    MODEL,
    JoinableHome,
    JoiningEngine,
    until,
)
from tests.scratch import scratch_for_a_while

WEIGHTS = "model.safetensors"
DIGESTS = {name: hashlib.sha256(each).hexdigest() for name, each in FILES.items()}
VERSION = version_of(DIGESTS)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_weights, "RETRY_AFTER_S", 0.0)


@pytest_asyncio.fixture
async def home() -> AsyncIterator[JoinableHome]:
    """Yield a home of two places that has the model's texts, and sends files."""
    with scratch_for_a_while() as folder:
        made = JoinableHome(Path(folder) / "home", ("both", "both"))
        fill(made.model_folder, {name: each for name, each in FILES.items() if name != WEIGHTS})
        await made.begin()
        await take_up(made)
        yield made
        await made.close()


def fill(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)


async def take_up(home: JoinableHome, bytes_per_s: int = 10**12, **changes: object) -> None:
    assert home.relay is not None
    config = msgspec.structs.replace(home.config(**changes), bytes_per_s=bytes_per_s)
    await home.relay.take_up(config)


class BareEngine:
    """An engine of another machine that has no files."""

    def __init__(self, home: JoinableHome, *remotes: Remote) -> None:
        self.box = home.engine().folder
        self.identity = JoinIdentity(self.box / "identity", self.box / "token")
        bare = identity_without_files(CONFIG, "")
        self.entrance = JoinedEntrance(home.address, self.identity, bare)
        self.cache = cache_of(self.box / "cache", *remotes)

    async def ask(self) -> ModelOffer:
        offer = await self.entrance.ask_for_files(waits=True)
        assert offer is not None
        return offer

    async def fetch(
        self, offer: ModelOffer, version: str | None = None, source: str | None = None
    ) -> BroughtModel:
        given = None if source is None else parse_source(source)
        entrance = self.entrance
        fetch = ModelFetch(self.cache, entrance.home, entrance.dial, offer, given)
        return await asyncio.to_thread(fetch.run, "model", version, {})


@pytest_asyncio.fixture
async def bare(home: JoinableHome) -> AsyncIterator[Callable[..., BareEngine]]:
    made = []

    def make(*remotes: Remote) -> BareEngine:
        made.append(BareEngine(home, *remotes))
        return made[-1]

    yield make
    for each in made:
        await each.entrance.close()


async def joined_with_files(home: JoinableHome) -> tuple[JoiningEngine, Path]:
    """Have an engine joined that has the model in its cache; return it with the folder."""
    engine = home.engine()
    cached = cache_of(engine.folder / "cache", Remote()).fetch(SOURCE, tell)
    config = msgspec.structs.replace(CONFIG, model=cached.folder, served_name=MODEL)
    engine.serves(config)
    await engine.begin()
    assert home.relay is not None
    joined = home.relay.joined
    await until(lambda: len(home.relay.joined) > len(joined) if home.relay else False)
    return engine, cached.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir()}


async def test_it_comes_from_the_home_and_is_admitted(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    fill(home.model_folder, FILES)
    engine = bare()
    offer = await engine.ask()
    assert offer.listings["model"].version == VERSION
    found = await engine.fetch(offer)
    assert found.name == MODEL and contents(found.folder) == FILES
    [entry] = engine.cache.entries()
    at = home.address
    assert (entry.version, entry.source) == (VERSION, f"peer:{at.host}:{at.port}/{MODEL}")
    config = msgspec.structs.replace(CONFIG, model=found.folder, served_name=found.name)
    identity = identity_of(config, engine.box / "files")
    assert identity.listings["model"].version == VERSION, "it sends to others what it was sent"
    engine.entrance.identify(identity, folders_of(config))
    await engine.entrance.ask()


async def test_it_comes_from_another_engine_where_the_home_has_the_texts_alone(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    await joined_with_files(home)
    found = await (engine := bare()).fetch(await engine.ask())
    assert contents(found.folder) == FILES


async def test_the_source_stands_in_for_an_engine_that_is_killed_amid_a_file(
    home: JoinableHome, bare: Callable[..., BareEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, _ = await joined_with_files(home)
    await take_up(home, sources={"model": str(SOURCE)})
    assert home.relay is not None
    came = 0

    async def kill_amid(size: int) -> None:
        nonlocal came
        came += size
        if came > sum(map(len, FILES.values())) - len(FILES[WEIGHTS]):
            await other.vanish()
            raise ConnectionResetError("it was killed")

    monkeypatch.setattr(weights, "PIECE_BYTES", 1000)
    offer = await (engine := bare(remote := Remote())).ask()
    monkeypatch.setattr(home.relay._weights._rate, "take", kill_amid)
    found = await engine.fetch(offer)
    assert contents(found.folder) == FILES and engine.cache.entries()[0].source == str(SOURCE)
    assert [name for name, _ in remote.reads].count(WEIGHTS) == 1


async def test_the_source_goes_on_where_a_peer_broke_off(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    """The peer's file is cut short on its disk after some bytes: the rest is the source's."""
    _, folder = await joined_with_files(home)
    await take_up(home, sources={"model": str(SOURCE)})
    spoil(folder / WEIGHTS, FILES[WEIGHTS][:4000])
    engine = bare(remote := Remote())
    found = await engine.fetch(await engine.ask())
    assert contents(found.folder) == FILES
    assert (WEIGHTS, 4000) in remote.reads and (WEIGHTS, 0) not in remote.reads


def spoil(path: Path, content: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(content)


async def test_one_that_lies_is_found_out(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    _, folder = await joined_with_files(home)
    spoil(folder / WEIGHTS, bytes(len(FILES[WEIGHTS])))
    engine = bare(remote := Remote())
    with pytest.raises(ConfigError, match="model.safetensors is not what its checksum says"):
        await engine.fetch(await engine.ask())
    assert not [each for each in engine.cache.entries() if each.version]
    await take_up(home, sources={"model": str(SOURCE)})
    found = await engine.fetch(await engine.ask())
    assert contents(found.folder) == FILES and (WEIGHTS, 0) in remote.reads


async def test_a_listing_that_is_no_model_of_the_home_is_offered_to_nobody(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    await joined_with_files(home)
    engine = bare()
    await take_up(home, versions={"model": "sha256:" + "0" * 64})
    assert not (await engine.ask()).listings["model"].has_weights
    await take_up(home)
    fill(home.model_folder, {"tokenizer.json": b"[]"})
    assert not (await engine.ask()).listings["model"].has_weights


async def test_a_file_that_nobody_has_any_more(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    other, _ = await joined_with_files(home)
    offer = await (engine := bare()).ask()
    await other.end()
    assert home.relay is not None
    await until(lambda: home.relay is not None and not home.relay.joined)
    with pytest.raises(ConfigError, match=f"{WEIGHTS}: no machine of this gateway has it now"):
        await engine.fetch(offer)


async def test_where_nobody_sends_it_and_no_source_is_known(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    line = f"no machine of {home.address} has the files of penny to send, .*: give --model"
    engine = bare(Remote())
    with pytest.raises(ConfigError, match=line):
        await engine.fetch(await engine.ask())
    fill(home.model_folder, FILES)
    await take_up(home, bytes_per_s=0)
    with pytest.raises(ConfigError, match=line):
        await engine.fetch(await engine.ask())
    found = await engine.fetch(await engine.ask(), source=str(SOURCE))
    assert contents(found.folder) == FILES


async def test_another_version_than_the_one_that_it_must_be_is_not_taken_from_a_peer(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    fill(home.model_folder, FILES)
    engine = bare(Remote({**FILES, WEIGHTS: b"others"}))
    wanted = version_of({**DIGESTS, WEIGHTS: hashlib.sha256(b"others").hexdigest()})
    found = await engine.fetch(await engine.ask(), version=wanted, source=str(SOURCE))
    assert found.folder.name == wanted.removeprefix("sha256:")


async def test_an_engine_that_is_started_without_a_model(home: JoinableHome) -> None:
    fill(home.model_folder, FILES)
    box, at = home.engine().folder, home.address
    written = ["--join", f"{at.host}:{at.port}", "--token", str(box / "token")]
    arguments = _arguments([*written, "--model-cache", str(box / "cache")])
    joined = _entrance_to(at, arguments)
    assert await asyncio.to_thread(_fetch_from_peers, joined, arguments)
    assert arguments.served_name == MODEL and contents(arguments.model) == FILES
    await joined.close()
    with pytest.raises(SystemExit):
        _arguments(["--listen", "tcp:127.0.0.1:1"])


# ---- who may ask for what


async def ask_for(engine: BareEngine, asked: FileRequest | bytes) -> FileRange | FileRefusal | None:
    reader, writer = await engine.entrance.dial()
    try:
        writer.write(asked if isinstance(asked, bytes) else encode_frame(asked))
        frames: FrameReader[FileRange | FileRefusal] = FrameReader(reader, FileAnswer)
        return await frames.read()
    except (ConnectionError, ProtocolError):
        return None
    finally:
        writer.transport.abort()


def request_for(content: bytes, start: int = 0, size: int = 1) -> FileRequest:
    return FileRequest(sha256=hashlib.sha256(content).hexdigest(), start=start, size=size)


async def test_only_files_of_the_model_that_it_was_let_in_for(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    fill(home.model_folder, FILES)
    beside = home.folder / "other"
    beside.mkdir()
    fill(beside, {**FILES, WEIGHTS: b"secret"})
    other = JoinableModel(
        name="other", folders={"model": beside}, options=home.model.options, places=()
    )
    assert home.relay is not None
    config = home.config()
    both = msgspec.structs.replace(config, models=(*config.models, other), bytes_per_s=10**12)
    await home.relay.take_up(both)
    engine = bare()
    assert await ask_for(engine, request_for(FILES[WEIGHTS])) is None, "it has no certificate yet"
    await engine.ask()
    assert await ask_for(engine, request_for(FILES[WEIGHTS])) == FileRange(1)
    refused = FileRefusal(reason="no machine of this gateway has it now", is_final=True)
    assert await ask_for(engine, request_for(b"secret")) == refused
    past = await ask_for(engine, request_for(FILES[WEIGHTS], len(FILES[WEIGHTS]), 1))
    assert isinstance(past, FileRefusal) and past.is_final
    for spoiled in (
        msgspec.structs.replace(request_for(b""), sha256="../../etc/passwd"),
        msgspec.structs.replace(request_for(b""), size=MAX_RANGE_BYTES + 1),
        msgspec.structs.replace(request_for(b""), start=-1),
    ):
        assert await ask_for(engine, spoiled) is None
    home.tokens.revoke(home.tokens.all()[0])
    await home.relay._end_revoked()
    assert await ask_for(engine, request_for(FILES[WEIGHTS])) is None


async def test_one_engine_has_so_many_connections(
    home: JoinableHome, bare: Callable[..., BareEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MAX_OF_ONE", 1)
    fill(home.model_folder, FILES)
    engine = bare()
    await engine.ask()
    reader, writer = await engine.entrance.dial()
    writer.write(encode_frame(request_for(FILES[WEIGHTS])))
    frames: FrameReader[FileRange | FileRefusal] = FrameReader(reader, FileAnswer)
    assert await frames.read() == FileRange(1)
    busy = await ask_for(engine, request_for(FILES[WEIGHTS]))
    assert isinstance(busy, FileRefusal) and not busy.is_final
    writer.transport.abort()


async def test_a_home_that_is_away_is_waited_for_only_where_nothing_else_is_known(
    home: JoinableHome, bare: Callable[..., BareEngine]
) -> None:
    engine = bare()
    await home.end()
    home.listener.close()
    assert await engine.entrance.ask_for_files(waits=False) is None


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a//b", "..", "a\\b", ""])
def test_a_name_that_leads_elsewhere(name: str) -> None:
    listing = ModelListing(
        version=version_of({name: "0" * 64}), part="model", files={name: ListedFile(1, "0" * 64)}
    )
    with pytest.raises(ConfigError, match="peer: "):
        listing.check("peer")


def test_a_listing_of_another_version() -> None:
    listing = ModelListing(version=VERSION, part="model", files={"a": ListedFile(1, "0" * 64)})
    with pytest.raises(ConfigError, match="peer: its files are version sha256:"):
        listing.check("peer")


def test_all_share_one_rate() -> None:
    now = 100.0
    rate = ByteRate(1000, lambda: now)
    assert [rate.delay_of(500), rate.delay_of(500), rate.delay_of(1)] == [0.0, 0.5, 1.0]
    now = 200.0
    assert rate.delay_of(500) == 0.0, "what nobody took is not saved up"

"""An engine that may not join is told why in one line, and nothing is left of the try."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from engine.__main__ import main
from engine.errors import ConfigError
from engine.protocol import EngineRole
from engine.transport.client import EngineClient
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.join_identity import JoinIdentity
from engine.transport.join_messages import Attachment, EngineIdentity, JoinToken
from gateway.fleet.joining import authority, relay
from gateway.fleet.joining.tokens import JoinTokens, NotJoinable, StoredToken, TooManyTokens
from tests.gateway.fleet.joining.home_of_engines import (
    WAIT_S,
    JoinableHome,
    JoiningEngine,
    generate,
    until,
)
from tests.scratch import scratch_for_a_while

Found = Callable[..., Awaitable[JoinableHome]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch_for_a_while() as made:
        yield Path(made)


@pytest_asyncio.fixture
async def found(folder: Path) -> AsyncIterator[Found]:
    """`await found(*roles)`: a home of its own with as many places, which is closed at the end."""
    homes: list[JoinableHome] = []

    async def begin(*roles: EngineRole) -> JoinableHome:
        homes.append(JoinableHome(folder / f"home-{len(homes)}", roles or ("both",)))
        await homes[-1].begin()
        return homes[-1]

    yield begin
    for home in homes:
        await home.close()


@pytest_asyncio.fixture
async def home(found: Found) -> JoinableHome:
    return await found()


async def refusal(engine: JoiningEngine) -> str:
    """Start an engine, which is refused; return why."""
    with pytest.raises(ConfigError) as refused:
        await engine.begin()
    assert "\n" not in refused.value.message
    return refused.value.message


def nobody_joined(home: JoinableHome, engine: JoiningEngine) -> bool:
    assert home.relay is not None
    return not len(home.relay._records) and not (engine.folder / "identity").exists()


def stored(home: JoinableHome) -> StoredToken:
    (found,) = home.tokens.all()
    return found


def age(home: JoinableHome) -> None:
    token = msgspec.structs.replace(stored(home), expires_at=int(time.time()) - 90)
    home.tokens._write(token)


def revoke(home: JoinableHome) -> None:
    home.tokens.revoke(stored(home))


def forget(home: JoinableHome) -> None:
    home.tokens._path(stored(home).id).unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (age, r"token join_\w+ expired 0:01:30 ago: `tollgate fleet token create` makes another"),
        (revoke, r"token join_\w+ was revoked"),
        (forget, "the token is not one of this gateway's"),
    ],
)
async def test_a_token_that_lets_nobody_in(
    home: JoinableHome, spoil: Callable[[JoinableHome], None], reason: str
) -> None:
    engine = home.engine()
    spoil(home)
    with pytest.raises(ConfigError, match=reason):
        await engine.begin()
    assert nobody_joined(home, engine)


async def test_a_token_lets_so_many_in_and_no_more(home: JoinableHome) -> None:
    first = home.engine()
    await first.begin()
    second = home.engine((first.folder / "token").read_text())
    assert "has been used 1 of 1 times" in await refusal(second)


async def test_a_request_for_a_certificate_that_is_none(
    home: JoinableHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the first join nor where one is to be renewed."""
    engine = home.engine()
    with monkeypatch.context() as patch:
        patch.setattr(JoinIdentity, "request", lambda self: b"no request")
        assert "no certificate request" in await refusal(engine)
        assert nobody_joined(home, engine)
    await engine.begin()
    await engine.vanish()
    monkeypatch.setattr("engine.transport.join_identity.RENEW_PART", 1.0)
    monkeypatch.setattr(JoinIdentity, "request", lambda self: b"no request")
    assert "no certificate request" in await refusal(engine)


async def test_a_secret_that_was_guessed(home: JoinableHome) -> None:
    engine = home.engine()
    token = JoinToken.of_text((engine.folder / "token").read_text())
    wrong = msgspec.structs.replace(token, secret="guess").to_text()
    (engine.folder / "token").write_text(wrong)
    assert await refusal(engine) == "the token is not one of this gateway's"


def changed(**changes: object) -> Callable[[EngineIdentity], EngineIdentity]:
    return lambda identity: msgspec.structs.replace(identity, **changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(protocol_version=3), "speaks protocol 3, this gateway "),
        (changed(model="quill"), "the engine serves quill; it was let in for penny"),
        (changed(files={"model/config.json": "0" * 128}), "model/config.json of penny is another"),
        (changed(files={}), "the engine lacks the model that penny has here"),
        (
            changed(options={"quantization": "int8"}),
            "--quantization is int8 there and none in the settings of penny",
        ),
    ],
)
async def test_an_engine_that_is_no_replica_of_the_model(
    home: JoinableHome, change: Callable[[EngineIdentity], EngineIdentity], reason: str
) -> None:
    engine = home.engine()
    engine.identity = change(engine.identity)
    assert reason in await refusal(engine)
    assert nobody_joined(home, engine)


@pytest.mark.parametrize(
    ("places", "role", "reason"),
    [
        (
            ("both",),
            "prefill",
            "the engines of penny have no roles here: --role prefill",
        ),
        (
            ("prefill", "decode", "decode"),
            "both",
            "the engines of penny have roles: 1 with --role prefill and 2 with --role decode may "
            "join, and none with --role both",
        ),
        (("decode",), "prefill", "1 with --role decode may join, and none with --role prefill"),
    ],
)
async def test_a_role_that_no_place_has(
    found: Found, places: tuple[EngineRole, ...], role: EngineRole, reason: str
) -> None:
    home = await found(*places)
    engine = home.engine(role=role)
    assert reason in await refusal(engine)
    assert nobody_joined(home, engine)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--listen", "unix:/s", "--role", "prefill"), "--role: only with --join"),
        (("--join", "h:1", "--token", "t", "--role", "dec0de"), "--role: invalid choice: 'dec0de'"),
    ],
)
def test_a_role_that_no_engine_can_start_with(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", "models/penny", *arguments])
    assert left.value.code == 2 and line in capsys.readouterr().err


async def test_a_role_that_nobody_knows(home: JoinableHome) -> None:
    """No engine of ours says one; who does is no engine, and hears nothing of the home."""
    engine = home.engine(role="dec0de")  # type: ignore[arg-type]
    await engine.begin()
    assert nobody_joined(home, engine)


async def test_weights_that_the_home_lacks_are_compared_with_those_of_who_is_there(
    found: Found,
) -> None:
    home = await found("both", "both")
    one, other = home.engine(), home.engine()
    one.identity.files["model/model.safetensors"] = "a" * 128
    other.identity.files["model/model.safetensors"] = "b" * 128
    await one.begin()
    assert home.relay is not None
    await until(lambda: bool(home.relay and home.relay.joined))
    line = "model/model.safetensors of penny is another one there (bbbbbbbbbbbb) than penny/0 has"
    assert line in await refusal(other)


async def test_a_clock_that_is_wrong(home: JoinableHome, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = home.engine()
    assert home.relay is not None
    home.relay._clock = lambda: time.time() + 7380
    assert "is 2:03:00 behind the gateway's: set it right" in await refusal(engine)


async def test_a_clock_by_which_the_certificate_is_yet_to_begin(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authority, "SKEW", timedelta(days=-1))
    line = await refusal((await found()).engine())
    assert "is not valid yet, by the clock of this machine (" in line


async def test_a_man_in_the_middle_with_a_certificate_of_his_own(
    home: JoinableHome, found: Found
) -> None:
    """Neither an engine that joins nor one that joined says anything to him."""
    middle = await found()
    engine, joined = home.engine(), home.engine()
    await joined.begin()
    await joined.vanish()
    for each in (engine, joined):
        each.home = middle.address
        line = await refusal(each)
        assert line.startswith(f"whoever answers at {middle.address} is not the home that made")
    assert middle.relay is not None and not len(middle.relay._records)


async def test_an_engine_of_another_home(
    home: JoinableHome, found: Found, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate that another home signed opens nothing here."""
    theirs = (await found()).engine()
    await theirs.begin()
    await theirs.vanish()
    ours = ssl.DER_cert_to_PEM_cert(authority.JoinAuthority(home.join).certificate)
    kept = (theirs.folder / "identity").read_text()
    end = "-----END CERTIFICATE-----\n"
    (theirs.folder / "identity").write_text(kept.split(end)[0] + end + ours)
    theirs.home = home.address
    with caplog.at_level("WARNING"):
        await theirs.begin()
    assert "does not know this engine's certificate" in caplog.text
    assert home.relay is not None and home.relay.joined == {}


async def test_a_token_that_is_revoked_ends_who_joined_by_it(
    home: JoinableHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LOOK_S", 0.01)
    engine = home.engine()
    await engine.begin()
    client = await EngineClient.connect(home.addresses[0], timeout_s=WAIT_S)
    home.tokens.revoke(stored(home))
    assert engine.serving is not None
    with pytest.raises(ConfigError, match="is not known here, or its token was revoked"):
        await engine.serving
    await until(lambda: not client.connected)
    await client.close()
    engine.serving = None
    assert "is not known here" in await refusal(engine)


async def test_two_engines_with_one_identity(home: JoinableHome) -> None:
    engine = home.engine()
    await engine.begin()
    with pytest.raises(ConfigError, match="another engine runs with it; give each its own"):
        JoinIdentity(engine.folder / "identity", engine.folder / "token")


async def test_strangers_disturb_nobody(home: JoinableHome) -> None:
    engine = home.engine()
    await engine.begin()
    client = await EngineClient.connect(home.addresses[0], timeout_s=WAIT_S)
    plain, writer = await asyncio.open_connection(home.address.host, home.address.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert await plain.read() == b""
    writer.close()
    box, host, port = home.engine().folder, home.address.host, home.address.port
    kept = JoinIdentity(box / "identity", box / "token")
    for said in (encode_frame(Attachment("0" * 32)), b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"):
        reader, writer = await asyncio.open_connection(
            host,
            port,
            ssl=kept.context(),
            server_hostname="home.tollgate",
        )
        writer.write(said)
        assert await FrameReader(reader, Attachment).read() is None
        writer.close()
    kept.release()
    assert len(await generate(client)) == 3
    await client.close()


@pytest.mark.parametrize(
    "text", ["", "tgjoin_", "tgjoin_!!", "tgjoin_" + "A" * 9000, "sk-tg-1", "tgjoin_gqF0"]
)
def test_what_is_no_token(text: str) -> None:
    with pytest.raises(ConfigError, match="not a token to join with") as refused:
        JoinToken.of_text(text)
    assert len(text) < 8 or text not in refused.value.message


def test_a_token_for_a_model_that_nobody_may_join(folder: Path) -> None:
    tokens = JoinTokens(folder, lambda: ("penny",))
    with pytest.raises(
        NotJoinable, match="settings of quill name no `joined` engines; engines may join penny"
    ):
        tokens.draw("quill", uses=1, expires_in_s=60)
    tokens = JoinTokens(folder, lambda: (), served=lambda: ("penny",))
    with pytest.raises(
        NotJoinable, match="no model of this name is served here; engines may join no m"
    ):
        tokens.draw("quill", uses=1, expires_in_s=60)
    assert tokens.all() == []


def test_tokens_that_ended_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.joining.tokens.MAX_TOKENS", 2)
    tokens = JoinTokens(folder, lambda: ("penny",))
    first, second, third = (tokens.draw("penny", uses=1, expires_in_s=60)[0] for _ in range(3))
    tokens.keep(first)
    tokens.keep(second)
    with pytest.raises(TooManyTokens, match="2 tokens still let engines join"):
        tokens.keep(third)
    tokens.revoke(first)
    tokens.keep(third)
    assert {each.id for each in tokens.all()} == {second.id, third.id}
    assert tokens.get("../secret") is None

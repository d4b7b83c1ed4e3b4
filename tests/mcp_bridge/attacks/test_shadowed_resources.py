"""Resources of several servers behind one URL: none is read in another's place."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.routing import resource_owners
from mcp_bridge.routing.sessions import MAX_URI_LEN
from mcp_bridge.upstream.resource_claims import MAX_TEMPLATE_LEN, MAX_TEMPLATES, MAX_URIS, Claims
from tests.mcp_bridge.attacks.hostile import Attacker, Client, attacked
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import whole

READ, NOT_FOUND = "resources/read", -32602


class Shelf(Attacker):
    """Lists `uris` and `templates`; reads what it `has`."""

    def __init__(self, *uris: str, templates: tuple[str, ...] = (), modern: bool = True) -> None:
        super().__init__(self.by_method, modern=modern)
        self.uris, self.templates = list(uris), list(templates)
        self.has = {*uris}
        self.is_silent = False

    def by_method(self, server: Any, writer: Any, message: Any) -> bytes:
        method, uri = message["method"], message["params"].get("uri")
        said: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "resources/list":
            said["result"] = {"resources": [{"uri": each, "name": each} for each in self.uris]}
        elif method == "resources/templates/list":
            found = [{"uriTemplate": each, "name": each} for each in self.templates]
            said["result"] = {"resourceTemplates": found}
        elif uri in self.has:
            said["result"] = {"contents": [{"uri": uri, "text": str(id(self))}]}
        else:
            said["error"] = {"code": NOT_FOUND, "message": "Resource not found"}
        return whole(said)

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if self.is_silent:
            writer.write(b"HTTP/1.1 503 Later\r\ncontent-length: 0\r\n\r\n")
        else:
            await super().reply(writer, message, head)

    @property
    def read(self) -> list[str]:
        return [each["params"]["uri"] for each in self.calls if each["method"] == READ]


async def read(client: Client, uri: str) -> dict[str, Any]:
    found = await ask_modern(client, "/mcp", READ, {"uri": uri})
    return found.get("error", found.get("result"))


def is_of(found: dict[str, Any], shelf: Shelf) -> bool:
    return bool(found["contents"][0]["text"] == str(id(shelf)))


@pytest.mark.parametrize("is_modern", [True, False])
@pytest.mark.parametrize(
    ("uris", "templates"),
    [
        (("db://rows/1",), ()),
        ((), ("db://rows/{id}",)),
        ((), ("db://{+all}",)),
        ((), ("db://{a}{b}",)),
    ],
    ids=["listed", "template", "wide", "unparsable"],
)
async def test_what_two_servers_claim_is_read_at_neither(
    redis: redis.asyncio.Redis, uris: tuple[str, ...], templates: tuple[str, ...], is_modern: bool
) -> None:
    """Whichever comes first; what only one claims is read there."""
    thief = Shelf(*uris, "own://x", templates=templates, modern=is_modern)
    thief.has.add("db://rows/1")
    owner = Shelf("db://rows/1", "files://a", modern=is_modern)
    for servers in ((thief, owner), (owner, thief)):
        async with attacked(redis, *servers) as client:
            refused = await read(client, "db://rows/1")
            assert refused["data"] == {"reason": "ambiguous_resource", "servers": ["s0", "s1"]}
            assert thief.read == owner.read == []
            session = await LegacyClient.open(client, "/mcp")
            told = await session.ask("/mcp", READ, {"uri": "db://rows/1"})
            assert told["error"]["code"] == NOT_FOUND
            assert "s0, s1" in told["error"]["message"]
            assert is_of(await read(client, "files://a"), owner)
            assert is_of(await read(client, "own://x"), thief)
            assert thief.read == ["own://x"]
        thief.calls.clear()
        owner.calls.clear()
        await redis.flushdb()


async def test_what_the_operator_vouches_for_is_its_servers(redis: redis.asyncio.Redis) -> None:
    thief, owner = Shelf("db://rows/1"), Shelf(templates=("db://rows/{id}",))
    owner.has.add("db://rows/1")
    async with attacked(redis, thief, owner) as client:
        endpoint = client.bridge.endpoint("org_alice")
        assert endpoint is not None
        vouched_for = endpoint.upstreams[1]
        vouched_for.config = msgspec.structs.replace(vouched_for.config, trust="all")
        assert is_of(await read(client, "db://rows/1"), owner)
    assert thief.read == []


async def test_who_falls_silent_keeps_what_it_listed(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once nothing is known any more of what it is."""
    monkeypatch.setattr(resource_owners, "FRESH_S", 0.0)
    owner, thief = Shelf("db://rows/1"), Shelf()
    thief.has.add("db://rows/1")
    async with attacked(redis, owner, thief) as client:
        assert is_of(await read(client, "db://rows/1"), owner)
        owner.is_silent = True
        thief.uris.append("db://rows/1")
        refused = await read(client, "db://rows/1")
        assert refused["data"]["servers"] == ["s0", "s1"]
        endpoint = client.bridge.endpoint("org_alice")
        assert endpoint is not None
        endpoint.upstreams[0].forget()
        assert (await read(client, "db://rows/1"))["data"]["servers"] == ["s0", "s1"]
        thief.uris.clear()
        unreachable = await read(client, "db://rows/1")
        assert unreachable["data"]["server"] == "s0"
    assert thief.read == []


async def test_what_nobody_lists_is_whose_it_is_that_alone_answers(
    redis: redis.asyncio.Redis,
) -> None:
    """A template without a scheme claims nothing, or it would claim all there is."""
    one, other = Shelf("db://a", templates=("{+any}",)), Shelf("files://a")
    other.has |= {"files://unlisted", "both://x"}
    one.has |= {"both://x"}
    async with attacked(redis, one, other) as client:
        assert is_of(await read(client, "files://unlisted"), other)
        assert (await read(client, "both://x"))["data"]["servers"] == ["s0", "s1"]
        nowhere = await read(client, "no://where")
        assert (nowhere["code"], nowhere["data"]) == (NOT_FOUND, {"uri": "no://where"})
        long = await read(client, "files://" + "a" * MAX_URI_LEN)
        assert long["message"] == f"uri: more than {MAX_URI_LEN} characters"


def test_what_a_server_claims_has_bounds() -> None:
    claims = Claims()
    for number in range(MAX_URIS + 1):
        claims.add(f"a:{number}")
    for number in range(MAX_TEMPLATES + 1):
        claims.add_template(f"b{number}:{{id}}")
    claims.add_template("c:" + "x" * MAX_TEMPLATE_LEN + "{id}")
    for junk in (None, 1, [], {}):
        claims.add(junk)
        claims.add_template(junk)
    assert claims.has(f"a:{MAX_URIS - 1}") and not claims.has(f"a:{MAX_URIS}")
    assert claims.has(f"b{MAX_TEMPLATES - 1}:1") and not claims.has(f"b{MAX_TEMPLATES}:1")
    assert not claims.has("c:" + "x" * MAX_TEMPLATE_LEN + "1")


SEGMENT = st.text("abcdef0123456789-_~", min_size=1, max_size=8)


@given(st.lists(SEGMENT, min_size=1, max_size=5), st.data())
def test_a_template_claims_what_can_be_made_of_it(parts: list[str], data: st.DataObject) -> None:
    written = [
        f"{{v{place}}}" if data.draw(st.booleans()) else part for place, part in enumerate(parts)
    ]
    claims = Claims()
    claims.add_template("x://" + "/".join(written))
    assert claims.has("x://" + "/".join(parts))
    assert not claims.has("y://" + "/".join(parts))
    assert not claims.has("x://" + "/".join([*parts, "more"]))

"""Pages of several servers: whoever follows the cursors has everything once, in few pages."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.caller import Caller
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.routing import paging as pages
from mcp_bridge.routing.endpoint import ClientContext, Endpoint
from mcp_bridge.routing.paging import MAX_PAGE, STALE_META, Pages
from mcp_bridge.upstream.upstream import Unreachable

CALLER = Caller(org_id="org", project_id="proj", subject="alice", client="key")


class Server(msgspec.Struct):
    """In place of an `Upstream`. `sizes`: of its pages; None: it gives no answer."""

    name: str
    sizes: list[int] | None


class Scripted(ClientContext):
    async def _page(
        self, upstream: Any, method: str, params: dict[str, Any], cursor: str | None
    ) -> dict[str, Any]:
        assert params == {}
        await asyncio.sleep(0)
        if upstream.sizes is None:
            raise Unreachable(upstream.name, "dead")
        at = int(cursor or 0)
        tools = [{"name": f"{upstream.name}-{at}-{one}"} for one in range(upstream.sizes[at])]
        more = {"nextCursor": str(at + 1)} if at + 1 < len(upstream.sizes) else {}
        return {"tools": tools, "ttlMs": 5, **more}


def everything_of(servers: list[Server]) -> list[str]:
    return [
        f"{server.name}-{at}-{one}"
        for server in servers
        for at, size in enumerate(server.sizes or ())
        for one in range(size)
    ]


def followed(servers: list[Server]) -> list[dict[str, Any]]:
    endpoint = Endpoint(key="k", upstreams=tuple(servers), keeps_names=False)  # type: ignore[arg-type]
    context = Scripted(
        caller=CALLER,
        endpoint=endpoint,
        envelope=Envelope(version="2026-07-28", capabilities={}),
        sessions=None,  # type: ignore[arg-type]
        guard=None,  # type: ignore[arg-type]
    )

    async def follow() -> list[dict[str, Any]]:
        found, params = [], {}
        while True:
            page = await context.list("tools/list", params)
            found.append(page)
            if "nextCursor" not in page:
                return found
            params = {"cursor": page["nextCursor"]}

    return asyncio.run(follow())


sizes = st.none() | st.lists(
    st.integers(0, 3) | st.sampled_from([600, 1_000]), min_size=1, max_size=4
)


@given(st.lists(sizes, min_size=1, max_size=20))
def test_everything_is_on_some_page_once_and_in_order(given_sizes: list[list[int] | None]) -> None:
    servers = [Server(f"s{at}", each) for at, each in enumerate(given_sizes)]
    found = followed(servers)
    listed = [[tool["name"] for tool in page["tools"]] for page in found]
    assert sum(listed, []) == everything_of(servers)
    assert all(len(page) <= MAX_PAGE for page in listed)
    num_own = sum(len(each or ()) for each in given_sizes)
    assert len(found) <= num_own + 1


def test_servers_with_little_share_a_page() -> None:
    found = followed([Server("a", [2]), Server("b", None), Server("c", [0]), Server("d", [3])])
    assert [len(page["tools"]) for page in found] == [5]
    assert "ttlMs" not in found[0], "nobody said how long all of it is good for"
    assert followed([Server("a", [2]), Server("b", None)])[0]["ttlMs"] == 5


def test_a_page_has_so_many_bytes(monkeypatch: Any) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 100)
    found = followed([Server("a", [1]), Server("b", [20]), Server("c", [1]), Server("d", [1])])
    assert [len(page["tools"]) for page in found] == [1, 20, 2]


def test_of_each_server_that_is_stale_is_said_so() -> None:
    filled = Pages("tools")
    for page in (
        {"tools": [], "_meta": {STALE_META: ["a"]}},
        {"tools": [{"name": "t"}]},
        {"tools": [{"name": "u"}], "_meta": {STALE_META: ["c"], "x": 1}},
    ):
        assert filled.take(page)
    assert filled.joined(None) == {
        "tools": [{"name": "t"}, {"name": "u"}],
        "_meta": {STALE_META: ["a", "c"]},
    }

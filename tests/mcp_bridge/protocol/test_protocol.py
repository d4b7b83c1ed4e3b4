"""The protocol's pure functions do what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation import sse
from foundation.json_values import MAX_VALUES
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import client_capabilities
from mcp_bridge.protocol.continuation import PREFIX, Continuation, Sealer, request_digest
from mcp_bridge.protocol.envelope import Envelope, check_param_headers, param_headers
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.protocol.translation import (
    is_wanted,
    server_capabilities,
    supported_filter,
    to_legacy_error,
    to_legacy_result,
    to_modern_error,
    to_modern_notification,
    to_modern_params,
    to_modern_result,
)
from mcp_bridge.server.allowed_origins import AllowedOrigins

NAMES = st.sampled_from(["a", "resultType", "ttlMs", "cacheScope", "content", "b"])
METAS = st.dictionaries(
    st.sampled_from(["own", "io.modelcontextprotocol/serverInfo", "progressToken"]), st.integers()
)
RESULTS = st.dictionaries(NAMES, st.text(max_size=3)).flatmap(
    lambda found: METAS.map(lambda meta: {**found, "_meta": meta} if meta else found)
)
ENVELOPE = Envelope(version="2026-07-28", capabilities={"roots": {}}, info={"name": "c"})
EVENTS = st.lists(
    st.tuples(
        st.binary(max_size=20).filter(lambda data: not {10, 13} & set(data)),
        st.none() | st.text("abc_123", min_size=1, max_size=8),
        st.none() | st.integers(0, 60_000),
    ).filter(lambda event: event != (b"", None, None)),
    max_size=8,
)


def test_every_code_of_an_error_is_told_once() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "mcp.md").read_text()
    said = re.findall(r"^\| (-32\d{3}) \| `(\w+)` \|", page, re.MULTILINE)
    known = {name: each for name, each in vars(rpc).items() if isinstance(each, int) and each < 0}
    assert len(set(known.values())) == len(known)
    assert {name: int(code) for code, name in said} == known


@given(EVENTS, st.lists(st.integers(1, 7), max_size=200))
def test_events_are_read_as_they_were_written_however_they_come(
    events: list[tuple[bytes, str | None, int | None]], cuts: list[int]
) -> None:
    written = b"".join(sse.encode(data, id=id_, retry_ms=retry) for data, id_, retry in events)
    decoder, read, place = sse.EventParser(1000, with_ids=True), [], 0
    for cut in [*cuts, len(written)]:
        read += decoder.feed(written[place : place + cut])
        place += cut
    assert [(event.data, event.id, event.retry_ms) for event in read] == events


@given(st.integers(1, 50), st.sampled_from([b"data: x", b"data: x\n", b": c\n", b"xxxxxxxx"]))
def test_no_event_is_longer_than_allowed(size: int, piece: bytes) -> None:
    decoder, fed = sse.EventParser(size, with_ids=True), 0
    with pytest.raises(sse.EventTooLarge):
        for _ in range(size + 2):
            fed += len(piece)
            decoder.feed(piece)
    assert fed <= size + 2 * len(piece)


@given(RESULTS)
def test_results_come_back_as_they_were(result: dict[str, Any]) -> None:
    """The conversion loses and adds only what the newer era alone has."""
    info = {"name": "tollgate", "version": "1"}
    modern = to_modern_result("tools/list", result, info)
    assert modern["_meta"]["io.modelcontextprotocol/serverInfo"] == info
    assert (modern["resultType"], modern["cacheScope"]) == ("complete", "private")
    assert modern["ttlMs"] == result.get("ttlMs", 0)
    legacy = to_legacy_result("tools/list", modern)
    assert legacy == to_legacy_result("tools/list", result)
    assert not legacy.keys() & {"resultType", "ttlMs", "cacheScope"}


@given(RESULTS)
def test_parameters_have_the_envelope_of_the_newer_era(params: dict[str, Any]) -> None:
    found = to_modern_params(params, ENVELOPE)
    assert found["_meta"]["io.modelcontextprotocol/clientCapabilities"] == {"roots": {}}
    without = {name: value for name, value in params.items() if name != "_meta"}
    assert {name: value for name, value in found.items() if name != "_meta"} == without


@given(st.binary(min_size=1, max_size=3), st.integers(0, 400), st.text(max_size=5))
def test_a_seal_opens_for_nothing_that_was_changed(flip: bytes, place: int, who: str) -> None:
    sealer = Sealer([b"n" * 32, b"o" * 32])
    digest = request_digest("", "tools/call", {"name": "x", "requestState": 1, "_meta": {}})
    assert digest == request_digest("", "tools/call", {"name": "x", "inputResponses": {}})
    assert digest != request_digest("other", "tools/call", {"name": "x"})
    kept = Continuation(server="s", expires_at=10.0, state="theirs")
    state = sealer.seal(kept, "alice", digest)
    assert sealer.unseal(state, "alice", digest, 9.0) == kept
    assert Sealer([b"x" * 32, b"n" * 32]).unseal(state, "alice", digest, 9.0) == kept
    place = len(PREFIX) + place % (len(state) - len(PREFIX))
    changed = state[:place] + flip.hex() + state[place + len(flip.hex()) :]
    wrong: list[tuple[Any, str, bytes, float]] = [
        (state, "alice", digest, 11.0),
        (state, "alice", digest[:-1] + b"\0", 9.0),
        (state + "=", "alice", digest, 9.0),
        (None, "alice", digest, 9.0),
    ]
    if who != "alice":
        wrong.append((state, who, digest, 9.0))
    if changed != state:
        wrong.append((changed, "alice", digest, 9.0))
    for given_state, principal, of, now in wrong:
        with pytest.raises(RpcError) as refused:
            sealer.unseal(given_state, principal, of, now)
        assert refused.value.data == {"reason": "invalid_request_state"}
    with pytest.raises(RpcError):
        Sealer([b"x" * 32]).unseal(state, "alice", digest, 9.0)


def test_a_state_that_could_not_come_back_is_not_given_out() -> None:
    sealer, digest = Sealer([b"n" * 32]), b"d"
    fits = Continuation(server="s", expires_at=10.0, state="x" * 48_000)
    assert sealer.unseal(sealer.seal(fits, "alice", digest), "alice", digest, 9.0) == fits
    for state in ("x" * 50_000, '"' * 25_000):
        with pytest.raises(RpcError) as refused:
            long = Continuation(server="s", expires_at=10.0, state=state)
            sealer.seal(long, "alice", digest)
        assert refused.value.data == {"server": "s", "reason": "state_too_long"}


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_what_is_no_message_is_refused(found: Any) -> None:
    with pytest.raises(RpcError):
        rpc.decode(msgspec.json.encode(found))


@pytest.mark.parametrize("numbers", ["9" * 257, ",".join(["5e-324"] * 2000)])
def test_a_message_that_is_slow_to_read_is_none(numbers: str) -> None:
    message = f'{{"jsonrpc":"2.0","id":1,"result":{{"content":[],"found":[{numbers}]}}}}'
    with pytest.raises(RpcError, match="Parse error: ") as refused:
        rpc.decode(message.encode())
    assert refused.value.code == rpc.PARSE_ERROR


@pytest.mark.parametrize("most", [MAX_VALUES, rpc.MAX_SERVER_VALUES])
def test_a_message_has_so_many_values(most: int) -> None:
    """Its bytes are no bound: an empty object of three takes sixty-four."""
    given, text = b",0" * (most - 5), b'"' + b",[{" * most + b'"'
    message = b'{"jsonrpc":"2.0","id":1,"result":{"found":[%b%b]}}'
    found = rpc.decode(message % (text, given), most)["result"]["found"]
    assert (found[0], len(found)) == (text[1:-1].decode(), most - 4)
    with pytest.raises(RpcError) as refused:
        rpc.decode(message % (text, given + b",0"), most)
    said = f"Parse error: more than {most} values in arrays and objects"
    assert (refused.value.code, refused.value.message) == (rpc.PARSE_ERROR, said)
    assert refused.value.data == {"reason": "too_many_values", "limit": most}


def test_errors_of_a_read_are_those_of_each_era() -> None:
    missing = RpcError(-32002, "not found")
    modern = to_modern_error("resources/read", {"uri": "a:b"}, missing)
    assert (modern.code, modern.data) == (-32602, {"uri": "a:b"})
    assert to_legacy_error("resources/read", {"uri": "a:b"}, modern).code == -32002
    assert to_legacy_error("resources/read", {"uri": "a:c"}, modern).code == -32602
    assert to_modern_error("tools/call", {}, missing) is missing


def test_capabilities_are_what_servers_have_together() -> None:
    one = {"tools": {"listChanged": True}, "logging": {}, "experimental": {"x": {}}}
    two = {"tools": {}, "resources": {"subscribe": True}}
    assert server_capabilities([one, two], legacy=False) == {
        "tools": {"listChanged": True},
        "resources": {"subscribe": True},
    }
    assert server_capabilities([two], legacy=True)["logging"] == {}


def test_changes_are_told_to_who_asked_for_them() -> None:
    can = {"tools": {"listChanged": True}, "resources": {"subscribe": True}}
    wanted = {
        "toolsListChanged": True,
        "promptsListChanged": True,
        "resourceSubscriptions": ["a:b"],
    }
    granted = supported_filter(wanted, can)
    assert granted == {"toolsListChanged": True, "resourceSubscriptions": ["a:b"]}
    tools = rpc.notification("notifications/tools/list_changed")
    prompts = rpc.notification("notifications/prompts/list_changed")
    updated = rpc.notification("notifications/resources/updated", {"uri": "a:b"})
    other = rpc.notification("notifications/resources/updated", {"uri": "a:c"})
    heard = [is_wanted(each, granted) for each in (tools, prompts, updated, other)]
    assert heard == [True, False, True, False]
    told = to_modern_notification(updated, 7)
    assert told is not None
    assert told["params"]["_meta"] == {"io.modelcontextprotocol/subscriptionId": 7}
    assert "_meta" not in updated["params"]


def test_arguments_travel_as_headers_and_agree() -> None:
    schema = {"type": "object", "properties": {"r": {"type": "string", "x-mcp-header": "R"}}}
    sent = param_headers(schema, {"r": "é"})
    folded = [(name.lower(), value) for name, value in sent.items()]
    check_param_headers(schema, {"r": "é"}, folded)
    for headers in ([], [("mcp-param-r", "e")], folded * 2):
        with pytest.raises(RpcError) as refused:
            check_param_headers(schema, {"r": "é"}, headers)
        assert refused.value.code == -32020


@pytest.mark.parametrize(
    ("public_url", "host", "origin", "is_let_in"),
    [
        ("http://127.0.0.1:8000", "localhost:8000", None, True),
        ("http://127.0.0.1:8000", "[::1]:8000", "http://localhost:3000", True),
        ("http://127.0.0.1:8000", "evil.example.com", None, False),
        ("http://127.0.0.1:8000", None, None, False),
        ("http://127.0.0.1:8000", "localhost", "http://evil.example.com", False),
        ("http://127.0.0.1:8000", "localhost", "null", False),
        ("https://gw.example.com", "10.0.0.1", None, True),
        ("https://gw.example.com", "gw.example.com", "https://gw.example.com", True),
        ("https://gw.example.com", "gw.example.com", "https://page.example.com", True),
        ("https://gw.example.com", "gw.example.com", "http://localhost", False),
        ("https://gw.example.com", "gw.example.com", "http://gw.example.com", False),
        ("https://gw.example.com", "gw.example.com", "https://[", False),
        ("http://127.0.0.1:8000", "localhost", "file://localhost", False),
    ],
)
def test_pages_of_others_are_not_let_in(
    public_url: str, host: str | None, origin: str | None, is_let_in: bool
) -> None:
    allowed = AllowedOrigins(public_url=public_url)
    if is_let_in:
        allowed.check(host, origin, {"https://page.example.com"})
    else:
        with pytest.raises(RpcError) as refused:
            allowed.check(host, origin, {"https://page.example.com"})
        assert refused.value.status == 403


ABILITIES = st.dictionaries(
    st.sampled_from(["elicitation", "sampling", "roots", "experimental", "x"]),
    st.dictionaries(
        st.sampled_from(["form", "url", "context", "tools", "listChanged", "y"]),
        st.booleans() | st.just({}) | st.dictionaries(st.text(max_size=2), st.integers()),
    )
    | st.integers(),
)


@given(ABILITIES)
def test_of_what_a_client_can_the_older_era_is_told_what_it_knows(given_: dict[str, Any]) -> None:
    """So there are few different ones, whatever clients make up."""
    found = client_capabilities(given_)
    assert client_capabilities(found) == found
    assert found.keys() <= {"elicitation", "sampling", "roots"}
    for name, flags in found.items():
        assert flags.keys() <= {*given_[name]} & {"form", "url", "context", "tools"}
        assert all(flag == {} for flag in flags.values())

"""Definitions whose JSON has a key twice, however spelled, are refused; others are as before."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_bridge.pinning import offer_of
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.repeated_keys import REFUSED, without_repeats
from mcp_bridge.protocol.rpc import RpcError
from tests.budget import examples


def listed(*tools: str, more: str = "") -> bytes:
    return f'{{"jsonrpc":"2.0","id":1,"result":{{"tools":[{",".join(tools)}]{more}}}}}'.encode()


def read(body: bytes) -> list[Any]:
    return rpc.decode(body)["result"]["tools"]


GOOD = '{"name":"good","description":"a \\": b \\u0022: c : d"}'


@pytest.mark.parametrize(
    ("tool", "path", "key"),
    [
        ('{"name":"a","description":"x","description":"y"}', "", "description"),
        ('{"name":"a","description":"x", "description" : "y\\u0022:"}', "", "description"),
        ('{"name":"a","d":"x","\\u0064":"\\u0022\\u003a"}', "", "d"),
        ('{"name":"a","d":"\\":","d"\n:"y\\u0022:"}', "", "d"),
        ('{"name":"a","inputSchema":{"properties":{"p":{"type":"string","type":"null"}}}}',
         "/inputSchema/properties/p", "type"),
        ('{"name":"a","icons":[{"src":"a","src":"b"}]}', "/icons/0", "src"),
        ('{"name":"b","name":"a"}', "", "name"),
    ],
)  # fmt: skip
def test_a_definition_with_a_key_twice_is_refused_alone(tool: str, path: str, key: str) -> None:
    good, bad = read(listed(GOOD, tool))
    assert good == json.loads(GOOD)
    assert bad == {"name": "a", REFUSED: [path, f'the key "{key}" stands twice']}
    offer = offer_of([("tool", good), ("tool", bad)])
    assert list(offer.pins) == [("tool", "good")]
    (refused,) = offer.unpinnable
    assert (refused.name, refused.path, "twice" in refused.reason) == ("a", path, True)


@pytest.mark.parametrize("more", [',"tools":[]', ',"nextCursor":"a","nextCursor":"b"'])
def test_a_list_with_a_key_twice_is_no_message(more: str) -> None:
    with pytest.raises(RpcError):
        rpc.decode(listed(GOOD, more=more))


def test_other_messages_are_read_as_ever() -> None:
    body = b'{"jsonrpc":"2.0","id":1,"result":{"content":[],"a":1,"a":2}}'
    assert rpc.decode(body)["result"]["a"] == 2


def test_the_mark_of_a_server_refuses_its_own_thing() -> None:
    for mark in (5, ["a"], ["", "x\u202e"], {"a": 1}):
        (refused,) = offer_of([("tool", {"name": "a", REFUSED: mark})]).unpinnable
        assert refused.name == "a" and "\u202e" not in refused.reason


texts = st.text(st.sampled_from('ab":\\ \n\u00e4'), max_size=4)
trees = st.recursive(
    texts | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(texts, inner), max_size=3).map(lambda pairs: ("pairs", pairs))
    ),
    max_leaves=10,
)


def spelled(tree: Any, ascii_only: bool, space: str) -> str:
    """JSON of a tree whose objects are lists of pairs."""
    if isinstance(tree, tuple):
        members = [
            f"{json.dumps(key, ensure_ascii=ascii_only)}{space}:{space}"
            + spelled(inner, ascii_only, space)
            for key, inner in tree[1]
        ]
        return "{" + ",".join(members) + "}"
    if isinstance(tree, list):
        return "[" + ",".join(spelled(one, ascii_only, space) for one in tree) + "]"
    return json.dumps(tree, ensure_ascii=ascii_only)


def repeats(tree: Any) -> bool:
    if isinstance(tree, tuple):
        keys = [key for key, _ in tree[1]]
        return len(set(keys)) < len(keys) or any(repeats(inner) for _, inner in tree[1])
    return isinstance(tree, list) and any(map(repeats, tree))


@settings(max_examples=examples(200), deadline=None)
@given(tree=trees, ascii_only=st.booleans(), space=st.sampled_from(["", " ", "\n"]))
def test_what_has_no_key_twice_is_never_refused_and_what_has_always_is(
    tree: Any, ascii_only: bool, space: str
) -> None:
    tool = f'{{"name":"a","x":{spelled(tree, ascii_only, space)}}}'
    body = listed(tool)
    found = without_repeats(body, msgspec.json.decode(body))["result"]["tools"]
    assert (REFUSED in found[0]) == repeats(tree)
    if not repeats(tree):
        assert found == [msgspec.json.decode(tool)]

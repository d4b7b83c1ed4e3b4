"""A large catalogue is searched, by who may see what, and said what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from mcp_types import Tool

from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.routing.pruning import called
from mcp_bridge.routing.search import (
    CALL,
    DESCRIPTORS,
    SEARCH,
    ListedTool,
    ToolIndex,
    words,
)
from mcp_bridge.validation.arguments import check, compile_schema


def listed(alias: str, description: str, **properties: str) -> ListedTool:
    schema = {
        "type": "object",
        "properties": {k: {"description": v} for k, v in properties.items()},
    }
    name = alias.split("__")[1]
    tool = {"name": name, "description": description, "inputSchema": schema}
    return ListedTool(alias, msgspec.json.encode(tool))


TOOLS = [
    listed("mail__send_email", "Sends an e-mail.", to="address of the recipient"),
    listed("mail__list_emails", "Lists mails of a folder, newest first."),
    listed("files__readFile", "Reads a file from disk.", path="where it is"),
    listed("git__commit", "Records changes to the repository."),
    listed("wetter__vorhersage", "Wettervorhersage für einen Ort."),
]


async def found(query: str, **options: object) -> list[str]:
    index = await ToolIndex.built(TOOLS)
    return [one.alias for one in await index.search(query, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("send an email", "mail__send_email"),
        ("read file", "files__readFile"),
        ("recipient address", "mail__send_email"),
        ("repository", "git__commit"),
        ("für", "wetter__vorhersage"),
    ],
)
async def test_the_tool_that_is_meant_comes_first(query: str, first: str) -> None:
    assert (await found(query))[0] == first


async def test_what_no_tool_has_is_not_found() -> None:
    assert await found("zzz") == [] == await found("")
    assert len(await found("a file of the mail", limit=1)) == 1


async def test_nothing_is_found_in_nothing() -> None:
    assert await (await ToolIndex.built([])).search("x") == []


async def test_meaning_finds_what_words_do_not() -> None:
    async def embed(texts: Sequence[str]) -> list[list[float]]:
        return [[float("commit" in t or "version control" in t), 0.1] for t in texts]

    index = await ToolIndex.built(TOOLS)
    await index.learn(embed)
    assert (await index.search("version control", embed=embed))[0].alias == "git__commit"
    assert await found("version control") == []


def test_words_inside_names_are_words() -> None:
    assert words("readFile list_emails HTTPServer2 für") == [
        "read", "file", "list", "emails", "http", "server", "2", "für",
    ]  # fmt: skip


def test_the_meta_tools_are_tools() -> None:
    assert [Tool.model_validate(one).name for one in DESCRIPTORS] == [SEARCH, CALL]
    schemas = [compile_schema(one["inputSchema"]) for one in DESCRIPTORS]
    assert check(schemas[0], {"query": "x", "limit": 3}) == ()
    assert check(schemas[0], {"query": ""})[0].path == "/query"
    assert check(schemas[1], {"name": "a__b", "arguments": []})[0].path == "/arguments"


def test_a_meta_call_names_a_tool_and_no_meta_tool() -> None:
    for given in ({"name": "a__b", "arguments": {"x": 1}}, {"name": "a__b"}):
        assert called({"name": CALL, "arguments": given}) == {"arguments": {}, **given}
    for name in (CALL, SEARCH):
        with pytest.raises(RpcError, match="by its own name"):
            called({"name": CALL, "arguments": {"name": name}})

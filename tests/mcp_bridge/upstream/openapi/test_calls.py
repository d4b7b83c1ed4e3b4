"""Calls become requests that go where the operator said, and nowhere else."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolResult, ImageContent, TextContent

from mcp_bridge.upstream.openapi.calls import (
    MAX_ANSWER_BYTES,
    HttpAnswer,
    HttpRequest,
    Secrets,
)
from mcp_bridge.upstream.openapi.errors import BadArguments
from mcp_bridge.upstream.openapi.tools import OpenApiTools
from tests.mcp_bridge.upstream.openapi.documents import PETS_30, asking

BASE = "https://api.example/v1"
JSON = {"content-type": "application/json; charset=utf-8"}


class Wire:
    """A wire that notes what was sent, and has an answer to send back."""

    def __init__(self, status: int = 200, body: bytes = b"{}", **headers: str) -> None:
        self.answer = HttpAnswer(status=status, headers=headers or JSON, body=body)
        self.sent: list[HttpRequest] = []

    async def send(self, request: HttpRequest, *, max_body_bytes: int) -> HttpAnswer:
        assert max_body_bytes == MAX_ANSWER_BYTES
        self.sent.append(request)
        return self.answer


async def sent(root: object, arguments: dict[str, Any], **secrets: dict[str, str]) -> HttpRequest:
    wire = Wire()
    upstream = OpenApiTools("x", json.dumps(root).encode(), BASE)
    assert upstream.left_out == (), upstream.left_out
    await upstream.call("ask", arguments, wire, Secrets(**secrets))
    return wire.sent[0]


def parameter(place: str, **more: Any) -> dict[str, Any]:
    return {"name": "color", "in": place, "schema": {}, **more}


STRING, ARRAY = "blue", ["blue", "black", "brown"]
OBJECT = {"R": 100, "G": 200, "B": 150}


@pytest.mark.parametrize(
    ("style", "explode", "values"),
    [
        ("matrix", False, (";color=blue", ";color=blue,black,brown", ";color=R,100,G,200,B,150")),
        (
            "matrix",
            True,
            (";color=blue", ";color=blue;color=black;color=brown", ";R=100;G=200;B=150"),
        ),
        ("label", False, (".blue", ".blue,black,brown", ".R,100,G,200,B,150")),
        ("label", True, (".blue", ".blue.black.brown", ".R=100.G=200.B=150")),
        ("simple", False, ("blue", "blue,black,brown", "R,100,G,200,B,150")),
        ("simple", True, ("blue", "blue,black,brown", "R=100,G=200,B=150")),
    ],
)
async def test_paths_by_the_table_of_openapi(
    style: str, explode: bool, values: tuple[str, ...]
) -> None:
    """OpenAPI 3.1.1, "Style Examples"."""
    root = asking(parameter("path", style=style, explode=explode), path="/x/{color}/y")
    for value, expected in zip((STRING, ARRAY, OBJECT), values, strict=True):
        request = await sent(root, {"color": value})
        assert request.url == f"{BASE}/x/{expected}/y"


@pytest.mark.parametrize(
    ("style", "explode", "array", "object_"),
    [
        ("form", False, "color=blue,black,brown", "color=R,100,G,200,B,150"),
        ("form", True, "color=blue&color=black&color=brown", "R=100&G=200&B=150"),
        (
            "spaceDelimited",
            False,
            "color=blue%20black%20brown",
            "color=R%20100%20G%20200%20B%20150",
        ),
        ("pipeDelimited", False, "color=blue%7Cblack%7Cbrown", "color=R%7C100%7CG%7C200%7CB%7C150"),
        ("deepObject", True, None, "color%5BR%5D=100&color%5BG%5D=200&color%5BB%5D=150"),
    ],
)
async def test_queries_by_the_table_of_openapi(
    style: str, explode: bool, array: str | None, object_: str
) -> None:
    root = asking(parameter("query", style=style, explode=explode))
    if array is not None:
        assert (await sent(root, {"color": ARRAY})).url == f"{BASE}/x?{array}"
    assert (await sent(root, {"color": OBJECT})).url == f"{BASE}/x?{object_}"


async def test_other_places_and_forms() -> None:
    header = await sent(asking(parameter("header")), {"color": ARRAY})
    assert dict(header.headers)["color"] == "blue,black,brown"
    header = await sent(asking(parameter("header", explode=True)), {"color": OBJECT})
    assert dict(header.headers)["color"] == "R=100,G=200,B=150"
    cookie = await sent(asking(parameter("cookie")), {"color": "a; b"})
    assert dict(cookie.headers)["cookie"] == "color=a%3B%20b"
    as_json = {"name": "color", "in": "query", "content": {"application/json": {"schema": {}}}}
    assert (await sent(asking(as_json), {"color": {"a": [1]}})).url.endswith(
        "?color=%7B%22a%22%3A%5B1%5D%7D"
    )
    reserved = asking(parameter("query", allowReserved=True))
    url = (await sent(reserved, {"color": "/a?b&c=d#e"})).url
    assert url == f"{BASE}/x?color=/a?b%26c%3Dd%23e"
    assert (await sent(asking(parameter("query")), {"color": [True, None, 1.5]})).url.endswith(
        "?color=true&color=&color=1.5"
    )
    assert (await sent(asking(parameter("query", explode=False)), {"color": []})).url == f"{BASE}/x"


def bodied(media_type: str, **more: Any) -> dict[str, Any]:
    return asking(method="post", requestBody={"content": {media_type: {"schema": {}}}, **more})


async def test_bodies() -> None:
    request = await sent(bodied("application/vnd.x+json"), {"body": {"a": [1, None]}})
    assert (request.method, request.body) == ("POST", b'{"a":[1,null]}')
    assert dict(request.headers)["content-type"] == "application/vnd.x+json"
    form = {"a": "x&y=z", "b": [1, 2], "c": {"d": True}}
    request = await sent(bodied("application/x-www-form-urlencoded"), {"body": form})
    assert request.body == b"a=x%26y%3Dz&b=1&b=2&c=%7B%22d%22%3Atrue%7D"
    assert (await sent(bodied("text/plain"), {"body": "h\u00e9"})).body == "h\u00e9".encode()
    assert (await sent(bodied("text/plain"), {})).body == b""
    for media_type, body, text in (
        ("text/plain", 3, "body: must be a string"),
        ("application/x-www-form-urlencoded", [1], "body: must be an object"),
        ("application/json", "x" * 5_000_000, "body: larger than"),
    ):
        with pytest.raises(BadArguments, match=text):
            await sent(bodied(media_type), {"body": body})
    with pytest.raises(BadArguments, match="body: is missing"):
        await sent(bodied("application/json", required=True), {})


async def test_credentials_stand_over_what_arguments_say() -> None:
    root = asking(
        parameter("query"), {"name": "X-Key", "in": "header"}, {"name": "s", "in": "cookie"}
    )
    request = await sent(
        root,
        {"color": "mine", "X-Key": "mine", "s": "mine"},
        headers={"X-Key": "secret", "Authorization": "Bearer t", "Cookie": "s=secret"},
        query={"color": "secret"},
    )
    assert "mine" not in f"{request.url}{request.headers}"
    assert dict(request.headers)["x-key"] == "secret"
    assert "secret" not in repr(Secrets(headers={"a": "secret"}))


@pytest.mark.parametrize(
    "value",
    [
        "..",
        ".",
        "../admin",
        "a/../../admin",
        "..\\admin",
        "..;/admin",
        "a\x00b",
        "a\r\nHost: evil",
        "",
        [],
        {"a": {"b": 1}},
        "x" * 20_000,
    ],
)
async def test_no_value_leads_out_of_its_path(value: object) -> None:
    with pytest.raises(BadArguments, match="^color: "):
        await sent(asking(parameter("path"), path="/x/{color}/y"), {"color": value})


async def test_a_dot_that_the_path_makes_a_parent_of_is_refused() -> None:
    with pytest.raises(BadArguments, match="color: makes a path"):
        await sent(asking(parameter("path"), path="/x/.{color}"), {"color": "."})


@given(st.text(min_size=1, max_size=30))
async def test_a_path_has_the_parts_that_it_was_written_with(value: str) -> None:
    root = asking(parameter("path"), parameter("query"), path="/x/{color}/y")
    root["paths"]["/x/{color}/y"]["get"]["parameters"][1]["name"] = "q"
    try:
        request = await sent(root, {"color": value, "q": value})
    except BadArguments:
        return
    parts = urlsplit(request.url)
    assert request.url.isascii()
    assert (parts.scheme, parts.netloc, parts.fragment) == ("https", "api.example", "")
    _, v1, x, color, y = parts.path.split("/")
    legible = value.encode("utf-8", "replace").decode()
    assert (v1, x, y, unquote(color)) == ("v1", "x", "y", legible)
    assert parse_qsl(parts.query, keep_blank_values=True) == [("q", legible)]


@given(st.text(max_size=20))
async def test_no_header_ends_early(value: str) -> None:
    try:
        request = await sent(asking(parameter("header")), {"color": value})
    except BadArguments:
        return
    assert not set("\r\n\0") & set(dict(request.headers)["color"])


async def test_what_is_no_argument_is_named() -> None:
    root = asking(parameter("query", required=True))
    for arguments, text in (({}, "color: is missing"), ({"color": 1, "x": 2}, "x: is no argument")):
        with pytest.raises(BadArguments, match=text):
            await sent(root, arguments)
    upstream = OpenApiTools("x", json.dumps(root).encode(), BASE)
    with pytest.raises(BadArguments, match="is no tool"):
        await upstream.call("nothing", {}, Wire())
    with pytest.raises(BadArguments, match="make a URL of more than"):
        await sent(root, {"color": ["x" * 3000] * 3})


async def answered(tool: str, wire: Wire, **arguments: Any) -> CallToolResult:
    upstream = OpenApiTools("pets", json.dumps(PETS_30).encode(), BASE)
    return await upstream.call(tool, arguments, wire)


def text_of(result: CallToolResult) -> str:
    content = result.content[0]
    assert isinstance(content, TextContent)
    return content.text


async def test_answers() -> None:
    added = await answered("addPet", Wire(201, b'{"id": 1, "name": null}'), body={"name": "x"})
    assert (added.is_error, added.structured_content) == (False, {"id": 1, "name": None})
    assert json.loads(text_of(added)) == {"id": 1, "name": None}
    listed = await answered("pets_list", Wire(200, b"[]"))
    assert listed.structured_content == {"result": []}
    got = await answered("getPet", Wire(200, b"[1]"), petId="1")
    assert (got.structured_content, text_of(got)) == (None, "[1]")
    got = await answered("getPet", Wire(200, b"hello", **{"content-type": "text/csv"}), petId="1")
    assert text_of(got) == "hello"
    done = await answered("delete_pets_petId", Wire(204, b""), petId="1")
    assert (done.is_error, text_of(done)) == (False, "")
    picture = await answered(
        "getPet", Wire(200, b"\x89P", **{"content-type": "image/png"}), petId="1"
    )
    assert isinstance(picture.content[0], ImageContent)
    assert (picture.content[0].data, picture.content[0].mime_type) == ("iVA=", "image/png")


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (Wire(404, b'{"error": "no\x1b[31m such pet"}'), 'HTTP 404: {"error": "no [31m such pet"}'),
        (Wire(500, b""), "HTTP 500"),
        (Wire(302, b"", location="http://169.254.169.254/"), "HTTP 302"),
        (Wire(500, b"x" * 100_000), "HTTP 500: " + "x" * 4096),
        (Wire(201, b"{"), "the answer says that it is JSON, and is not"),
        (Wire(201, b"9" * 300), "the answer has a number of more than 256 characters"),
        (Wire(201, b"[0%b]" % (b",0" * 500_000)), "the answer has more than 500000 values"),
        (Wire(201, b"[]"), "the answer is no object"),
        (Wire(201, b"hello", **{"content-type": "text/plain"}), "the answer is no JSON"),
        (Wire(201, b" " * (MAX_ANSWER_BYTES + 1)), "the answer is larger than"),
    ],
    ids=["404", "500", "redirect", "long", "broken", "slow", "many", "array", "text", "large"],
)
async def test_answers_that_are_errors(wire: Wire, text: str) -> None:
    result = await answered("addPet", wire, body={})
    assert result.is_error and result.structured_content is None
    assert text_of(result).startswith(text)
    assert "169.254" not in text_of(result)


async def test_what_is_neither_text_nor_a_picture_is_said() -> None:
    wire = Wire(200, b"\xff\xfe", **{"content-type": "application/zip"})
    result = await answered("getPet", wire, petId="1")
    assert result.is_error and "an answer of 2 bytes" in text_of(result)

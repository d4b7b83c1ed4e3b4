"""Bad input gets a clear error at the door, names the field, reserves nothing and bills nothing."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.stack import Stack

pytestmark = pytest.mark.slow

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def post(stack: Stack, body: bytes | dict[str, Any], **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    key = stack.credentials["api_key"]
    return httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        content=content,
        headers={"authorization": f"Bearer {key}", "content-type": "application/json", **headers},
        timeout=30,
    )


INVALID_UTF8 = b'{"model": "penny", "messages": [{"role": "user", "content": "\xff\xfe"}]}'

CASES: list[tuple[str, Any, int, str | None]] = [
    ("unknown model", {"model": "gpt-99", "messages": HELLO}, 404, "model"),
    ("empty model", {"model": "", "messages": HELLO}, 400, "model"),
    ("no messages", {"model": "penny"}, 400, "messages"),
    ("empty messages", {"model": "penny", "messages": []}, 400, "messages"),
    ("unknown field", {"model": "penny", "messages": HELLO, "foo": 1}, 400, "foo"),
    ("wrong type", {"model": "penny", "messages": HELLO, "max_tokens": "ten"}, 400, "max_tokens"),
    ("bool as int", {"model": "penny", "messages": HELLO, "max_tokens": True}, 400, "max_tokens"),
    ("zero tokens", {"model": "penny", "messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    ("too hot", {"model": "penny", "messages": HELLO, "temperature": 9}, 400, "temperature"),
    ("tools", {"model": "penny", "messages": HELLO, "tools": [{}]}, 400, "tools[0].type"),
    (
        "bad role",
        {"model": "penny", "messages": [{"role": "wizard", "content": "x"}]},
        400,
        "messages[0].role",
    ),
    (
        "image part",
        {
            "model": "penny",
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ],
        },
        400,
        "messages[0].content[0].type",
    ),
    (
        "over-long prompt",
        {"model": "penny", "messages": [{"role": "user", "content": "long " * 20_000}]},
        400,
        "messages",
    ), ("max_tokens beyond", {"model": "penny", "messages": HELLO, "max_tokens": 10**6}, 400, None),
    ("broken JSON", b'{"model": "penny", "messages": [', 400, "messages[0]"),
    ("not an object", b"[1, 2]", 400, None),
    ("invalid UTF-8", INVALID_UTF8, 400, "messages[0].content"),
    (
        "lone surrogate",
        b'{"model": "penny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        400,
        "messages[0].content",
    ),
    (
        "bad bias",
        {"model": "penny", "messages": HELLO, "logit_bias": {"5": 1, "abc": 1}},
        400,
        "logit_bias.abc",
    ),
    (
        "many parts",
        b'{"model": "penny", "messages": [{"role": "user", "content": ['
        + b'{"type": "text", "text": ""},' * 300_000
        + b'{"type": "text", "text": ""}]}]}',
        400,
        None,
    ),
    ("empty", b"", 400, None),
    ("NaN", b'{"model": "penny", "top_p": NaN, "messages": []}', 400, "top_p"),
    ("deep", b"[" * 100_000, 400, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "param"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_each_mistake_is_named_and_costs_nothing(
    stack: Stack, body: Any, status: int, param: str | None
) -> None:
    answers: list[httpx.Response] = []

    def mistake() -> tuple[int]:
        answers.append(post(stack, body))
        return (0,)

    stack.wait_counted(mistake, ("tollgate_tokens_total", {}))
    answer = answers[-1]
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert answer.headers["x-request-id"].startswith("req_")


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("response_format", {"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ("prediction", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ("custom tool", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    (
        "audio part",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
                    ],
                }
            ]
        },
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(
    ("fields", "param"), [case[1:] for case in UNSUPPORTED], ids=[case[0] for case in UNSUPPORTED]
)
def test_what_is_not_supported_yet_is_said_to_the_sdk(
    stack: Stack, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        stack.client(max_retries=0).chat.completions.create(
            model="penny", messages=HELLO, extra_body=fields
        )
    error = caught.value
    assert (error.code, error.param) == ("unsupported_parameter", param)
    assert param in error.message and "not support" in error.message


@pytest.mark.parametrize("coding", ["gzip", "identity, br"])
def test_a_compressed_body_is_a_415_that_names_the_header(stack: Stack, coding: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        stack.client(max_retries=0).chat.completions.create(
            model="penny", messages=HELLO, extra_headers={"content-encoding": coding}
        )
    error = caught.value
    assert (error.status_code, error.param) == (415, "Content-Encoding")
    assert "Content-Encoding" in error.message and error.code == "unsupported_content_encoding"


def test_identity_is_no_coding(stack: Stack) -> None:
    body = {"model": "penny", "messages": HELLO, "max_tokens": 1}
    assert post(stack, body, **{"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("route", ["usage/completions", "costs"])
@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=soon", "start_time"),
        ("start_time=1&limit=0", "limit"),
        ("start_time=1&limit=1000", "limit"),
        ("start_time=5&end_time=4", "end_time"),
        ("start_time=1&bucket_width=1w", "bucket_width"),
        ("start_time=1&group_by[]=colour", "group_by[0]"),
        ("start_time=1&page=x", "page"),
        ("start_time=1&project_ids[]=%00", "project_ids"),
        ("start_time=1&project_ids[]=%ff", "project_ids"),
        ("start_time=1&colour=red", "colour"),
    ],
)
def test_a_bad_query_is_named(stack: Stack, route: str, query: str, param: str) -> None:
    answer = httpx.get(
        f"{stack.base_url}/v1/organization/{route}?{query}",
        headers={"authorization": f"Bearer {stack.credentials['admin_key']}"},
        timeout=30,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert param.split("[")[0] in error["message"]


PART = b"x" * (1 << 20)
LARGE = 64 * len(PART)


def assert_too_large(status: int, body: bytes) -> None:
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (413, "request_too_large", "body")
    assert f"more than {16 * 1024 * 1024} bytes" in error["message"]


@pytest.mark.parametrize("framing", [{"content-length": str(LARGE)}, {}], ids=["length", "chunks"])
def test_a_body_of_64_mb_is_a_413_on_a_connection_that_stays(
    stack: Stack, framing: dict[str, str]
) -> None:
    """A client that sends all of it before it reads has its answer, and its next one."""
    headers = {"authorization": f"Bearer {stack.credentials['api_key']}", **framing}
    opened: list[Any] = []

    def note(name: str, info: Any) -> None:
        opened.extend([name] if name == "connection.connect_tcp.complete" else [])

    with httpx.Client(base_url=stack.base_url, timeout=30) as client:
        traced = {"trace": note}
        parts = (PART for _ in range(64))
        path = "/v1/chat/completions"
        answer = client.post(path, content=parts, headers=headers, extensions=traced)
        assert_too_large(answer.status_code, answer.content)
        assert client.get("/health/live", extensions=traced).status_code == 200
    assert len(opened) == 1


def test_who_asks_before_sending_64_mb_is_told_not_to(stack: Stack) -> None:
    client = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=30)
    client.putrequest("POST", "/v1/chat/completions")
    client.putheader("authorization", f"Bearer {stack.credentials['api_key']}")
    client.putheader("content-length", str(LARGE))
    client.putheader("expect", "100-continue")
    client.endheaders()
    answer = client.getresponse()
    assert_too_large(answer.status, answer.read())
    client.close()


@pytest.mark.parametrize("key", ["", "nonsense", "sk-tg-" + "a" * 43, "sk-tg-" + "a" * 9_000])
def test_a_bad_key_is_a_401_before_the_body_is_read(stack: Stack, key: str) -> None:
    answer = httpx.post(
        f"{stack.base_url}/v1/chat/completions",
        content=b"not even JSON",
        headers={"authorization": f"Bearer {key}"} if key else None,
    )
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_the_sdk_raises_its_own_errors(stack: Stack) -> None:
    client = stack.client(max_retries=0)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="penny", messages=[{"role": "user", "content": "long " * 20_000}]
        )
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        stack.client(api_key="sk-tg-x").models.list()
    with pytest.raises(openai.PermissionDeniedError):
        mere_key = stack.credentials["api_key"]
        stack.client(admin_api_key=mere_key).admin.organization.usage.costs(start_time=1)


def test_other_urls_and_methods_answer_in_the_same_shape(stack: Stack) -> None:
    nowhere = httpx.get(f"{stack.base_url}/v1/nowhere")
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_url")
    method = httpx.get(f"{stack.base_url}/v1/chat/completions")
    assert method.status_code == 405 and "error" in method.json()


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("OPTIONS", "/v1/chat/completions", "POST"),
        ("OPTIONS", "/v1/models/penny", "GET, HEAD"),
        ("OPTIONS", "/health/live", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/models", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_allowed_says_which_are(
    stack: Stack, method: str, path: str, allow: str, with_key: bool
) -> None:
    headers = {"authorization": f"Bearer {stack.credentials['api_key']}"} if with_key else {}
    answer = httpx.request(method, f"{stack.base_url}{path}", headers=headers)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["message"] == "Method not allowed for this URL."


def test_malformed_http_is_answered_in_the_same_shape(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        answer = b""
        while data := client.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 400 ") and b'"code":"invalid_http"' in answer

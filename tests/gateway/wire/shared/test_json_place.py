"""Bytes to fields: any body, broken anywhere, is answered fast with the place or with none."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.json_values import MAX_VALUES
from gateway.request_errors import BadField
from gateway.wire.anthropic.from_anthropic import from_anthropic, from_count_tokens
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import from_embeddings
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.tokenizing import from_detokenize, from_tokenize
from gateway.wire.openai_responses.from_responses import read_response
from gateway.wire.shared.json_place import (
    MAX_PATH_CHARS,
    locate,
    lone_surrogate,
)
from gateway.wire.shared.refusals import decode_kept

MARK = "\u00a7"
KEYS = st.text(st.characters(exclude_characters=MARK + ".[", codec="utf-8"), max_size=5)
LEAVES = st.none() | st.integers() | st.sampled_from(['a, "b": [{', "\\", "}]", ""])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
STEPS = st.lists(st.integers(0, 3) | KEYS, min_size=1, max_size=6)


def around(path: list[int | str], before: Any, after: Any) -> Any:
    """The marked leaf at `path`, with neighbours on both sides at each level."""
    value: Any = f"x{MARK}"
    for step in reversed(path):
        if isinstance(step, int):
            value = [before] * step + [value, after]
        else:
            value = {step + "0": before, step: value, step + "1": after}
    return value


def written(path: list[int | str]) -> str:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            # As it stands in the body: a key's escapes are not resolved.
            key = json.dumps(step, ensure_ascii=False)[1:-1]
            text += f".{key}" if text else key
    return text


@given(STEPS, VALUES, VALUES, st.sampled_from([None, 1, "\t"]))
def test_a_byte_of_any_document_is_found(
    path: list[int | str], before: Any, after: Any, indent: Any
) -> None:
    text = json.dumps(around(path, before, after), ensure_ascii=False, indent=indent)
    body = text.encode()
    offset = body.index(MARK.encode())
    assert locate(body, offset) == (written(path) or None)
    assert locate(body[:offset], offset) == (written(path) or None), "cut off there"


MESSAGES = b'{"model": "m", "messages": [{"role": "user", "content": %b}]}'
CONTENT = "messages[0].content"
BROKEN = {
    "UTF-8": (MESSAGES % b'"ab\xff"', CONTENT, "invalid UTF-8"),
    "cut UTF-8": (MESSAGES % b'"ab\xe2\x82"', CONTENT, "invalid UTF-8"),
    "surrogate as UTF-8": (MESSAGES % b'"\xed\xa0\x80"', CONTENT, "invalid UTF-8"),
    "UTF-8 in a part": (
        MESSAGES % b'[{"type": "text", "text": "a"}, {"type": "text", "text": "\xff"}]',
        "messages[0].content[1].text",
        "invalid UTF-8",
    ),
    "UTF-8 in a key": (
        b'{"model": "m", "messages": [{"role": "user", "x\xff": 1}]}',
        "messages[0].x\ufffd",
        "invalid UTF-8",
    ),
    "high surrogate at the end": (MESSAGES % b'"\\ud800"', CONTENT, "surrogate"),
    "high surrogate": (MESSAGES % b'"\\ud800 and more"', CONTENT, "surrogate"),
    "low surrogate": (MESSAGES % b'"a \\udc00 b"', CONTENT, "surrogate"),
    "bad escape": (MESSAGES % b'"a\\q"', CONTENT, "escape"),
    "control character": (MESSAGES % b'"a\x01"', CONTENT, "invalid character"),
    "no comma": (MESSAGES % b'"a" x', CONTENT, "expected ','"),
    "NaN": (b'{"model": "m", "top_p": NaN}', "top_p", "invalid character"),
    "bad literal": (b'{"model": "m", "stream": tru}', "stream", "invalid character"),
    "bad literal, then more": (b'{"model": "m", "stream": tru, "n": 1}', "stream", "invalid"),
    "leading zero": (b'{"model": "m", "n": 01}', "n", "invalid number"),
    "trailing comma": (b'{"model": "m", "n": 1,}', "n", "trailing comma"),
    "no value": (b'{"model": "m", "n": }', "n", "invalid character"),
    "no colon": (b'{"model": "m", "n" 1}', "n", "expected ':'"),
    "cut in text": (b'{"model": "m", "messages": [{"role": "us', "messages[0].role", "too early"),
    "cut in an array": (b'{"model": "m", "messages": [', "messages[0]", "too early"),
    "cut after a comma": (b'{"model": "m", "n": 1,', "n", "too early"),
    "empty": (b"", None, "too early"),
    "no JSON": (b"model=m", None, "line 1, column 1, byte 0"),
    "more behind it": (b'{"model": "m"} x', None, "trailing characters"),
    "deep": (b'{"model": "m", "x": ' + b"[" * 90_000, "x" + "[0]" * 32, "too deep"),
    "deep keys": (b'{"model": "m", "x": ' + b'{"%b": ' % (b"y" * 99) * 9_000, None, "too deep"),
}


@pytest.mark.parametrize("kind", ["engine", "upstream"])
@pytest.mark.parametrize(("body", "param", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_is_named(body: bytes, param: str | None, words: str, kind: Any) -> None:
    with pytest.raises(BadField) as caught:
        from_openai(body, kind)
    error = caught.value
    if error.message.startswith(("Unrecognized", "Missing")):
        # Our engine's shapes refuse an unknown field, or a missing one, before what is broken.
        assert kind == "engine"
        return
    assert words in error.message and "could not parse" in error.message
    assert error.param == param or (words == "too deep" and error.param)
    assert error.param is None or len(error.param) <= MAX_PATH_CHARS


def test_a_place_has_a_line_and_a_column() -> None:
    with pytest.raises(BadField, match=r"at line 3, column 8, byte 25, in or after 'n'"):
        from_openai(b'{\n  "model": "m",\n  "n": x\n}', "upstream")


def test_an_escaped_backslash_begins_no_surrogate() -> None:
    assert lone_surrogate(b'"\\\\ud800"') is None
    assert lone_surrogate(b'"\\ud83d\\ude00"') is None
    assert lone_surrogate(b'"\\\\\\ud800"') is not None


@pytest.mark.parametrize(
    ("number", "reason"),
    [(b"1e999", "Number out of range"), (b"7" * 5_000, "a number of more than 256 characters")],
)
def test_a_number_beyond_all_bounds_is_named(number: bytes, reason: str) -> None:
    body = b'{"model": "m", "x": 1e3, "vendor": [1, {"size": -%b}]}' % number
    with pytest.raises(BadField) as caught:
        from_openai(body, "upstream")
    assert caught.value.param == "vendor[1].size" and reason in caught.value.message


# ---- large bodies

SIZE = 4 * 2**20
HEAD = b'{"model": "m", "messages": ['


def repeated(item: bytes, head: bytes = HEAD, tail: bytes = b"]}") -> bytes:
    return head + b",".join([item] * (SIZE // (len(item) + 1))) + tail


LARGE = {
    "messages": (repeated(b'{"role":"user","content":""}'), "messages"),
    "parts": (
        repeated(b'{"type":"text","text":""}', HEAD + b'{"role":"user","content":[', b"]}]}"),
        "messages[0].content",
    ),
    "empty objects": (repeated(b"{ }"), "messages"),
    "empty arrays": (repeated(b"[]"), "messages"),
    "nested": (repeated(b"[{}]"), "messages"),
    "scalars": (repeated(b"1"), "messages"),
    "entries": (repeated(b'"x": 1', b'{"model": "m", "logit_bias": {', b"}}"), "logit_bias"),
}
MAX_REFUSAL_S = 1.0
"""Bounds the processor time of a refusal, which takes about 0.1 s."""


@pytest.mark.parametrize("kind", ["engine", "upstream"])
@pytest.mark.parametrize(("body", "param"), LARGE.values(), ids=LARGE.keys())
def test_megabytes_of_small_values_are_refused_undecoded(
    body: bytes, param: str, kind: Any
) -> None:
    begun = time.process_time()
    with pytest.raises(BadField, match=f"more than {MAX_VALUES} values") as caught:
        from_openai(body, kind)
    assert caught.value.param is not None and caught.value.param.startswith(param)
    assert time.process_time() - begun < MAX_REFUSAL_S


@pytest.mark.parametrize("kind", ["engine", "upstream"])
def test_megabytes_of_text_are_not(kind: Any) -> None:
    text = '[1, {"x": "y"}], ' * (SIZE // 24)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    assert from_openai(body, kind).n == 1


DIGITS = b"7" * 4_299
DOORS = {
    "chat": (lambda body: from_openai(body, "engine"), b'{"model":"m","tools":[{"x":%b}]}'),
    "forwarded": (lambda body: from_openai(body, "upstream"), b'{"model":"m","tools":[{"x":%b}]}'),
    "messages": (lambda body: from_anthropic(body, "engine"), b'{"model":"m","tools":[{"x":%b}]}'),
    "counted": (from_count_tokens, b'{"model":"m","tools":[{"x":%b}]}'),
    "responses": (read_response, b'{"model":"m","tools":[{"x":%b}]}'),
    "ids": (lambda body: from_completions(body, "engine"), b'{"model":"m","prompt":[%b]}'),
    "embedded ids": (lambda body: from_embeddings(body, "engine"), b'{"model":"m","input":[[%b]]}'),
    "tokenize": (from_tokenize, b'{"model":"m","tools":[{"x":%b}]}'),
    "detokenize": (from_detokenize, b'{"model":"m","tokens":[%b]}'),
    "kept": (partial(decode_kept, msgspec.json.Decoder()), b'{"tools":[{"x":%b}]}'),
}
"""Readers of bodies, and a body with a place for a number."""
SLOW = {
    "long": (b"1," + b",".join([DIGITS] * 3_488), "a number of more than 256 characters"),
    "small": (b",".join([b"5e-324"] * 99_000), "more than 1000 numbers close to zero"),
}
"""Numbers in an array that took 0.3 s and 0.7 s to read."""


@pytest.mark.parametrize(("numbers", "words"), SLOW.values(), ids=SLOW)
@pytest.mark.parametrize(("read", "body"), DOORS.values(), ids=DOORS)
def test_numbers_that_are_slow_to_read_are_refused_undecoded(
    read: Any, body: bytes, numbers: bytes, words: str
) -> None:
    place = b"%b" if b"[%b]" in body else b"[%b]"
    with pytest.raises(BadField, match=words) as caught:
        read(body % (place % numbers))
    assert caught.value.param is not None
    assert caught.value.param.startswith(("tools[0].x[", "prompt[", "input[0][", "tokens["))
    assert f"at '{caught.value.param}' already" in caught.value.message


HOSTILE = {
    "escapes": b'{"model": "' + b'\\"' * (SIZE // 2),
    "backslashes": b'{"model": "' + b"\\" * SIZE,
    "quotes": b'"' * SIZE,
    "spaces": b'{"model": "m", "x": ' + b" " * SIZE,
    "digits": b'{"model": "m", "x": ' + b"1" * SIZE + b"e999}",
    "surrogates": b'{"model": "' + b"\\ud83d\\ude00" * (SIZE // 12),
    "bad at the end": b'{"model": "m", "messages": "' + b"x" * SIZE + b'\xff"}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_body_takes_linear_time(body: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(BadField):
        from_openai(body, "upstream")
    assert time.process_time() - begun < MAX_REFUSAL_S


class Kept(msgspec.Struct):
    name: str = ""
    lines: dict[str, list[str]] = {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"name": "a\u0000b"}', "name"),
        (rb'{"name": "\\\u0000"}', "name"),
        (rb'{"name": "a", "lines": {"k": ["x", "\u0000"]}}', "lines.k[1]"),
        (rb'{"name": "a\\u0000b"}', None),
        (rb'{"name": "a\u00001"}', "name"),
        (rb'{"name": "\u0001", "lines": {}}', None),
    ],
)
def test_a_nul_is_refused_by_its_field_where_it_would_be_kept(
    body: bytes, param: str | None
) -> None:
    decoder = msgspec.json.Decoder(Kept)
    if param is None:
        assert decode_kept(decoder, body) == decoder.decode(body)
        return
    with pytest.raises(BadField, match="NUL") as refused:
        decode_kept(decoder, body)
    assert refused.value.param == param

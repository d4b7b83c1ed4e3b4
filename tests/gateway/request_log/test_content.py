"""The texts of a request are those that the model was given and wrote, whatever the API; each side
is cut at its bound and says so."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generate_request import (
    ChatPrompt,
    CompletionPrompt,
    EmbeddingPrompt,
    GenerateRequest,
    PlainForward,
    Tool,
    ToolUse,
    WrittenIds,
)
from gateway.generation_events import CallDelta, Items, RawBody, RawChunk, RawRun, TextDelta
from gateway.request_log import content as module
from gateway.request_log.content import (
    MESSAGE_BYTES,
    RequestContent,
    StoredCall,
    StoredChoice,
    StoredMessage,
    bounded,
    cut,
    decode,
    encode,
    to_content,
)
from gateway.telemetry import captured_content
from gateway.telemetry.captured_content import CapturedContent


def captured(request: GenerateRequest, *items: Items) -> CapturedContent:
    found = CapturedContent()
    found.begin(request)
    for each in items:
        found.add(each)
    return found


def asks(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", stream=True, include_usage=False, **fields)


def content_of(request: GenerateRequest, *items: Items) -> RequestContent:
    found = to_content(captured(request, *items))
    assert found is not None
    return decode(encode(found))


def user(text: str, index: int = 0) -> StoredMessage:
    return StoredMessage(index=index, role="user", text=text)


def test_a_conversation_with_an_engine_of_ours() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    shown = {"type": "function", "function": {"name": "f"}}
    prompt = ChatPrompt(
        messages=[
            {"role": "user", "content": "hi <b>", "name": "ann"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "7", "tool_call_id": "c1"},
        ],
        tools=ToolUse(tools=(Tool(name="f", shown=shown),)),
    )
    found = content_of(
        asks(prompt=prompt),
        (TextDelta(index=0, text="", reasoning="so"), TextDelta(index=1, text="no")),
        (TextDelta(index=0, text="It is ", calls=(CallDelta(0, "f", '{"b"'),)),),
        (TextDelta(index=0, text="7", calls=(CallDelta(0, None, ":2}"),), finish_reason="stop"),),
    )
    assert found.messages == (
        StoredMessage(index=0, role="user", text="hi <b>", name="ann"),
        StoredMessage(
            index=1,
            role="assistant",
            reasoning="hm",
            calls=(StoredCall("f", '{"a": 1}', "c1"),),
        ),
        StoredMessage(index=2, role="tool", text="7", call_id="c1"),
    )
    assert found.tools == (shown,)
    assert found.choices == (
        StoredChoice(
            text="It is 7",
            reasoning="so",
            calls=(StoredCall("f", '{"b":2}'),),
            finish_reason="stop",
        ),
        StoredChoice(index=1, text="no"),
    )
    assert not found.is_cut


def test_a_conversation_with_an_upstream_as_it_wrote_it() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what"}, image]},
            {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": {}}},
        ],
        "tools": [{"type": "function", "function": {"name": "g"}}],
    }
    found = content_of(
        asks(forward=body),
        (RawChunk(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'),),
        (RawRun(b'{"choices":[{"delta":{"content":"', [b"a\\n", b"b", b"\xc3\xa9"], b'"}}]}'),),
        (RawChunk(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}'),),
    )
    assert [it.text for it in found.messages] == ["what\n[image_url]", ""]
    assert found.messages[1].calls == (StoredCall("g", "{}"),)
    assert found.tools == tuple(body["tools"])
    assert found.choices == (StoredChoice(text="a\nb\u00e9", finish_reason="stop"),)
    whole = RawBody(b'{"choices":[{"message":{"content":"x","reasoning":"y"}}]}')
    assert content_of(asks(forward=body), (whole,)).choices == (
        StoredChoice(text="x", reasoning="y"),
    )


def test_completions_and_what_writes_no_text() -> None:
    ours = asks(completion=CompletionPrompt(prompts=("once", WrittenIds(b"1,2,3", "prompt"))))
    found = content_of(ours, (TextDelta(index=1, text="x"),))
    assert (found.prompts, found.choices) == (("once", "1,2,3"), (StoredChoice(index=1, text="x"),))
    plain = PlainForward(path="completions", prompts=("upon",))
    payload = RawChunk(b'{"choices":[{"text":"a","index":0,"finish_reason":"length"}]}')
    found = content_of(asks(forward={"prompt": "upon"}, plain=plain), (payload,))
    assert found.prompts == ("upon",)
    assert found.choices == (StoredChoice(text="a", finish_reason="length"),)
    for request in (
        asks(embedding=EmbeddingPrompt(prompts=("x",))),
        asks(forward={}, plain=PlainForward(path="embeddings", prompts=("x",))),
    ):
        assert to_content(captured(request)) is None
    assert to_content(CapturedContent()) is None


def test_a_round_of_a_loop_takes_the_place_of_the_one_before() -> None:
    first, second = (
        asks(prompt=ChatPrompt(messages=[{"role": "user", "content": text}])) for text in "ab"
    )
    found = captured(first, (TextDelta(index=0, text="x"),))
    assert to_content(found) is not None
    found.begin(second)
    found.add((TextDelta(index=0, text="y"),))
    content = to_content(found)
    assert content is not None
    assert (content.messages, content.choices) == ((user("b"),), (StoredChoice(text="y"),))


def test_texts_are_made_once_of_what_was_captured() -> None:
    """The log of texts and the spans of the request want the same ones."""
    request = asks(prompt=ChatPrompt(messages=[{"role": "user", "content": "a"}]))
    found = captured(request, (TextDelta(index=0, text="x"),))
    assert to_content(found) is to_content(found)
    found.add((TextDelta(index=0, text="y"),))
    content = to_content(found)
    assert content is not None and content.choices == (StoredChoice(text="xy"),)


def test_an_answer_that_is_no_json_raises_what_is_expected() -> None:
    broken = captured(asks(forward={"messages": []}), (RawBody(b"{"),))
    with pytest.raises(ValueError, match="completion"):
        to_content(broken)


def test_the_answer_is_cut_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 10)
    request = asks(prompt=ChatPrompt(messages=[]))
    found = content_of(request, (TextDelta(index=0, text="\u00e9" * 4),) * 2)
    assert found.choices == (StoredChoice(text="\u00e9" * 5, left_out=3),)
    assert found.is_cut
    monkeypatch.setattr(captured_content, "MAX_HELD_BYTES", 250)
    many = captured(request, *[(TextDelta(index=0, text="ab"),)] * 9)
    assert (many.is_cut, len(many.items)) == (True, 2)
    content = to_content(many)
    assert content is not None and content.is_cut


def test_a_long_conversation_keeps_its_beginning_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_INPUT_BYTES", 10 * (MESSAGE_BYTES + 10))
    texts = [user(f"{index:010d}", index) for index in range(100)]
    found = bounded((), texts)
    assert [it.index for it in found.messages] == [0, 1, 2, 3, 4, *range(95, 100)]
    assert (found.messages_left_out, found.is_cut) == (90, True)
    one = bounded((), [user("x" * 2000)])
    assert len(one.messages[0].text) == 10 * (MESSAGE_BYTES + 10) - MESSAGE_BYTES
    assert one.messages[0].left_out == 2000 - len(one.messages[0].text)
    asked = bounded((), [user("system"), user("y" * 2000, 1)])
    assert asked.messages[0].text == "system" and 500 < len(asked.messages[1].text) < 700
    two = bounded((), [user("x" * 2000), user("y" * 2000, 1)])
    assert [it.text[:1] for it in two.messages] == ["x", "y"]


@given(
    st.lists(st.text(max_size=40), max_size=30),
    st.lists(st.text(max_size=20), max_size=4),
    st.integers(0, 900),
)
def test_what_is_stored_is_within_the_bound_and_tells_what_is_missing(
    texts: list[str], tools: list[str], bound: int
) -> None:
    messages = [user(text, index) for index, text in enumerate(texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_INPUT_BYTES", bound)
        found = bounded(tuple({"name": name} for name in tools), messages)
    size = sum(it.size for it in found.messages) + sum(len(encode(it)) for it in found.tools)
    assert size <= bound + 2 * MESSAGE_BYTES
    assert found.messages_left_out == len(texts) - len(found.messages)
    assert found.tools_left_out == len(tools) - len(found.tools)
    for message in found.messages:
        assert texts[message.index].startswith(message.text)
        assert len(message.text) + message.left_out == len(texts[message.index])
    whole = sum(it.size for it in messages) + sum(len(encode({"name": it})) for it in tools)
    if whole <= bound // 2:
        assert not found.is_cut
    assert decode(msgspec.json.encode(found)) == found


@given(st.text(), st.integers(-3, 50))
def test_a_text_is_cut_between_characters(text: str, most: int) -> None:
    kept, missing = cut(text, most)
    assert text == kept + text[len(kept) :] and len(kept) + missing == len(text)
    assert len(kept.encode()) <= max(0, most)
    assert missing == 0 or len(text[: len(kept) + 1].encode()) > most

"""Requests that hypothesis makes up, of all surfaces that answer with a model's tokens or count
them: valid ones, with every option beside every other, and ones that are nearly valid.

`asked(surface)` draws a `FuzzRequest`. What a test has kept before is named by `PREVIOUS`, whose
call is `CALLED`, and by `CONVERSATION`; they stand in a body until it is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.gateway.fuzz.anthropic_bodies import (
    COUNTED,
    MAX_TOKENS,
    MESSAGES,
    MESSAGES_MESSAGES,
)
from tests.gateway.fuzz.openai_bodies import (
    CHAT,
    CHAT_MESSAGES,
    COMPLETION,
    CONVERSATION,
    EMBEDDING,
    IDS,
    INPUT,
    ITEMS,
    PROMPT,
    RESPONSE,
    TOKENIZED,
)
from tests.gateway.fuzz.texts import (
    JUNK,
    METADATA,
    RAW_MARKS,
    TEXT,
    Fields,
)

MOST_OPTIONS = 6
"""A request gets this many options beside its required fields; with all at once nearly all requests
are refused."""
SHAPES = ("whole", "stream", "both", "left")
"""How an answer is read; `left`: its client leaves when the first bytes came."""


class FuzzRequest(msgspec.Struct, frozen=True, kw_only=True):
    surface: str
    path: str
    body: dict[str, Any]
    """As it was made; of a valid one the mode is still to be said."""
    raw: bytes | None = None
    """The bytes that are sent instead of `body`, if they are no longer JSON of that form."""
    shape: str = "whole"


# ---- what a surface is asked


class SurfaceOf(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    needed: Fields
    options: Fields
    streams: bool = True
    has_model: bool = True


SURFACES: Mapping[str, SurfaceOf] = {
    "chat": SurfaceOf(
        path="/v1/chat/completions", needed={"messages": CHAT_MESSAGES}, options=CHAT
    ),
    "completions": SurfaceOf(path="/v1/completions", needed={"prompt": PROMPT}, options=COMPLETION),
    "responses": SurfaceOf(path="/v1/responses", needed={"input": INPUT}, options=RESPONSE),
    "messages": SurfaceOf(
        path="/v1/messages",
        needed={"messages": MESSAGES_MESSAGES, "max_tokens": MAX_TOKENS},
        options=MESSAGES,
    ),
    "embeddings": SurfaceOf(
        path="/v1/embeddings", needed={"input": PROMPT}, options=EMBEDDING, streams=False
    ),
    "tokenize": SurfaceOf(
        path="/v1/tokenize",
        needed={"prompt": TEXT},
        options={"tools": st.none(), **TOKENIZED},
        streams=False,
    ),
    "tokenize a chat": SurfaceOf(
        path="/v1/tokenize",
        needed={"messages": CHAT_MESSAGES},
        options={**TOKENIZED, "tools": CHAT["tools"]},
        streams=False,
    ),
    "detokenize": SurfaceOf(
        path="/v1/detokenize", needed={"tokens": IDS}, options={}, streams=False
    ),
    "count_tokens": SurfaceOf(
        path="/v1/messages/count_tokens",
        needed={"messages": MESSAGES_MESSAGES},
        options=COUNTED,
        streams=False,
    ),
    "input_tokens": SurfaceOf(
        path="/v1/responses/input_tokens",
        needed={"input": INPUT},
        options=RESPONSE,
        streams=False,
    ),
    "conversations": SurfaceOf(
        path="/v1/conversations",
        needed={"items": ITEMS},
        options={"metadata": METADATA},
        streams=False,
        has_model=False,
    ),
    "items of one": SurfaceOf(
        path=f"/v1/conversations/{CONVERSATION}/items",
        needed={"items": ITEMS},
        options={},
        streams=False,
        has_model=False,
    ),
}
MODEL = st.sampled_from(["near"] * 12 + ["far"] * 2 + ["nobody", ""])
FIELD_NAMES = sorted({name for each in SURFACES.values() for name in (*each.needed, *each.options)})


def to_raw(body: Any, *, ensure_ascii: bool = True) -> bytes:
    """As a client would send it; what `json` does not write is put in. Where it is not escaped half
    of a surrogate pair is no UTF-8."""
    found = json.dumps(body, ensure_ascii=ensure_ascii).encode("utf-8", "surrogatepass")
    for mark, raw in RAW_MARKS.items():
        found = found.replace(mark, raw)
    return found


@st.composite
def bodies(draw: st.DrawFn, surface: SurfaceOf) -> dict[str, Any]:
    named = st.sampled_from(sorted(surface.options)) if surface.options else st.nothing()
    names = draw(st.lists(named, max_size=min(MOST_OPTIONS, len(surface.options))))
    chosen = {name: surface.options[name] for name in dict.fromkeys(names)}
    found = {"model": draw(MODEL)} if surface.has_model else {}
    for name, values in {**surface.needed, **chosen}.items():
        found[name] = draw(values)
    return deepcopy(found)  # what was sampled is many bodies' own


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths in a body but its own."""
    inside: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value[:20]))
    found = [(*path, key) for key, _ in inside]
    for key, inner in inside:
        found += places(inner, (*path, key))
    return found


@st.composite
def spoilt(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """Nearly what it was: one place holds something else, more of it, or nothing."""
    path = draw(st.sampled_from(places(body)))
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    match draw(st.sampled_from(["junk", "junk", "gone", "more", "beside", "again"])):
        case "junk":
            holder[path[-1]] = draw(JUNK)
        case "gone":
            del holder[path[-1]]
        case "more" if isinstance(holder, list):
            holder.extend(holder * draw(st.sampled_from([1, 3, 200])))
        case "again" if isinstance(holder, list):
            holder.reverse()
        case _:
            body[draw(st.sampled_from([*FIELD_NAMES, "nobody", "", "\ud800"]))] = draw(JUNK)
    return body


@st.composite
def broken(draw: st.DrawFn, raw: bytes) -> bytes:
    """No JSON any more, or hardly."""
    at = draw(st.integers(0, len(raw)))
    junk = draw(
        st.sampled_from(
            [
                b"",
                b"\xff",
                b"\x00",
                b"\\u",
                b"\\ud800",
                b'"',
                b"{",
                b"]",
                b",,",
                b"NaN",
                b"\xed\xa0",
            ]
        )
    )
    match draw(st.sampled_from(["cut", "put", "over", "behind", "twice"])):
        case "cut":
            return raw[:at]
        case "put":
            return raw[:at] + junk + raw[at:]
        case "over":
            return raw[:at] + junk + raw[at + 1 :]
        case "behind":
            return raw + junk
    return raw[:-1] + b"," + raw[1:]  # each key twice


@st.composite
def asked(draw: st.DrawFn, name: str) -> FuzzRequest:
    surface = SURFACES[name]
    body = draw(bodies(surface))
    shape = draw(st.sampled_from(SHAPES)) if surface.streams else "whole"
    found = FuzzRequest(surface=name, path=surface.path, body=body, shape=shape)
    match draw(st.sampled_from(["good"] * 7 + ["spoilt"] * 3 + ["broken"])):
        case "spoilt":
            body = draw(spoilt(body))
            return msgspec.structs.replace(found, body=body)
        case "broken":
            raw = to_raw(body, ensure_ascii=draw(st.booleans()))
            return msgspec.structs.replace(found, raw=draw(broken(raw)), shape="whole")
    return found

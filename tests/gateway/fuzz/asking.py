"""A client that asks a running gateway what `conversations` makes up, looks at each answer as
`speaking` says, and compares what it was told with the bill.

`FUZZ_EXAMPLES=2000` asks for so many examples of each surface, other ones each time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, Phase, given, note, settings

from billing.events import INPUTS, OUTPUTS
from tests.gateway.fuzz import speaking
from tests.gateway.fuzz.conversations import FuzzRequest, asked
from tests.gateway.fuzz.openai_bodies import CALLED, CONVERSATION, PREVIOUS

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""0: as many as the test says, always the same."""
NEAR = "near"
"""How bodies name the gateway's own model."""
SEED_OF_A_CALL = 4242
KEPT_FOR = 16
"""Requests that continue the same response and the same conversation."""
MUCH = 256
MOST = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
"""The field that bounds the output of each surface; all others name it `max_tokens`."""
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def is_much(max_tokens: object) -> bool:
    """Return whether an answer of so many tokens takes seconds."""
    return isinstance(max_tokens, int) and max_tokens > MUCH


class Asker:
    """`model`: what its own model is called. `calls`: what makes it call `TOOL`. `max_tokens`: what
    is asked for where nothing is said, by a model that takes its time."""

    def __init__(
        self,
        url: str,
        key: str,
        *,
        model: str = NEAR,
        calls: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=speaking.TIMEOUT_S)
        self.model, self.calls, self.max_tokens = model, calls or {}, max_tokens
        self.told: dict[str, tuple[int, int] | None] = {}
        """By request: what its answer said that it used; None: it did not say."""
        self.refused: set[str] = set()
        self.num_asked = 0
        self.kept: dict[str, str] = {}

    def try_all(self, surface: str, few: int) -> None:
        examples, before = EXAMPLES or few, len(self.told)

        @settings(
            max_examples=examples,
            derandomize=not EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(asked(surface))
        def ask(drawn: FuzzRequest) -> None:
            self.examine(self.meant(drawn))

        ask()
        assert len(self.told) - before >= examples / 8, "hardly anything was answered"

    def examine(self, meant: FuzzRequest) -> None:
        shapes = {"both": (False, True), "whole": (False,)}.get(meant.shape, (True,))
        note(f"{meant.shape}: {meant.raw or meant.body!r}"[:2000])
        answers = [self.ask(meant, stream=each) for each in shapes]
        good = [each for each in answers if each.status == 200]
        if meant.shape == "left" or any(map(is_in_background, good)):
            return
        strict = meant.body.get("model", self.model) == self.model
        for each in good:
            read = speaking.check_stream if each.is_stream else speaking.check_whole
            read(meant, each, strict=strict)
        # A conversation is longer by the first answer when the second one reads it.
        if len(good) == 2 and strict and not meant.body.get("conversation"):
            speaking.check_same(meant, *good)

    def ask(self, asked: FuzzRequest, *, stream: bool) -> speaking.Answer:
        answer = speaking.send(self.http, asked, stream=stream)
        if answer.status != 200:
            speaking.check_refusal(asked, answer)
            self.refused.add(answer.request_id)
        elif asked.shape == "left" or is_in_background(answer):
            self.told[answer.request_id] = None
        else:
            self.told[answer.request_id] = speaking.told(asked, answer)
        return answer

    def meant(self, asked: FuzzRequest) -> FuzzRequest:
        """With what is there in the place of what stands for it; what is asked both ways says the
        same each time."""
        if self.num_asked % KEPT_FOR == 0:
            self.keep_anew()
        self.num_asked += 1
        body, most = asked.body, MOST.get(asked.surface, "max_tokens")
        if self.max_tokens is not None:
            # As much as a model writes until its context is full takes it long, and says no more.
            body = {
                name: self.max_tokens if name in (most, "max_tokens") and is_much(value) else value
                for name, value in body.items()
            }
            if not body.keys() & {"max_tokens", most}:
                body = {most: self.max_tokens, **body}
        if asked.shape == "both" and asked.surface == "messages":
            body = {**body, "temperature": 0}
        elif asked.shape == "both":
            body = {"seed": 7, **body}
        text = json.dumps(body)
        for mark, kept in self.kept.items():
            text = text.replace(json.dumps(mark), json.dumps(kept))
        path = asked.path.replace(CONVERSATION, self.kept[CONVERSATION])
        return msgspec.structs.replace(asked, path=path, body=json.loads(text))

    def keep_anew(self) -> None:
        """Drop what requests continue, which would outgrow the context."""
        first = self.post("/v1/responses", input="hi", tools=[TOOL], model=self.model, **self.calls)
        (call,) = (each for each in first["output"] if each["type"] == "function_call")
        conversation = self.post("/v1/conversations", items=HELLO)
        self.kept = {
            PREVIOUS: first["id"],
            CALLED: call["call_id"],
            CONVERSATION: conversation["id"],
            NEAR: self.model,
        }

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def check_bill(self, rows: Sequence[Any], generated: int) -> None:
        """`rows`: all usage events. `generated`: tokens that its own model's engine made."""
        billed = {row.request_id: row for row in rows if row.kind == "usage"}
        assert len(billed) == sum(row.kind == "usage" for row in rows), "nothing twice"
        assert not self.refused & billed.keys(), "nobody pays for a refusal"
        for request_id, used in self.told.items():
            if used is not None:
                assert used == tokens_of(billed[request_id])
        assert sum(tokens_of(row)[1] for row in rows if row.model == self.model) == generated


def is_in_background(answer: speaking.Answer) -> bool:
    return not answer.is_stream and answer.json.get("status") == "queued"


def tokens_of(row: Any) -> tuple[int, int]:
    """Return the tokens that were read and written."""
    found = row._mapping
    return sum(found[name] for name in INPUTS), sum(found[name] for name in OUTPUTS)

"""The routes and defaults that vLLM's clients rely on, as a whole worker serves them: whose health,
version and tokenizer it is, and what a request without a model means."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.gateway.routes.openapi.running import ROOT, TIMEOUT_S, Running

PENNY = ROOT / "models" / "penny"
TOKENIZER = Tokenizer.load(PENNY)
HELLO = [{"role": "user", "content": "Hello, who are you?"}]


def ask(
    worker: Running, method: str, path: str, *, key: str | None = "", **options: Any
) -> requests.Response:
    """`key`: empty: one that may do everything; None: none."""
    shown = {} if key is None else {"authorization": f"Bearer {key or worker.everything}"}
    return worker.session.request(
        method, worker.url + path, headers=shown, timeout=TIMEOUT_S, **options
    )


def test_health_and_version_are_open_and_say_no_more_than_they_must(worker: Running) -> None:
    for path in ("/health", "/ping"):
        answer = ask(worker, "GET", path, key=None)
        assert (answer.status_code, answer.content) == (200, b""), path
    assert ask(worker, "GET", "/version", key=None).json().keys() == {"version"}


def test_a_model_says_what_it_stands_for_and_how_long_a_prompt_may_be(worker: Running) -> None:
    near, far = ask(worker, "GET", "/v1/models").json()["data"]
    assert (near["root"], near["parent"], near["max_model_len"]) == ("near", None, 4096)
    assert (far["root"], far["parent"], far["max_model_len"]) == ("far", None, None)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_texts_become_tokens_and_texts_again(worker: Running, prefix: str) -> None:
    text = "vllm1 This is a test prompt. ü"
    token_ids = TOKENIZER.encode(text, add_special_tokens=True)
    asked = {"model": "near", "prompt": text, "return_token_strs": True}
    found = ask(worker, "POST", f"{prefix}/tokenize", json=asked).json()
    pieces = TOKENIZER.pieces(token_ids)
    assert found == {
        "count": len(token_ids),
        "max_model_len": 4096,
        "tokens": token_ids,
        "token_strs": pieces,
    }
    assert any(piece.startswith("Ġ") for piece in pieces)
    back = {"model": "near", "tokens": token_ids}
    assert ask(worker, "POST", f"{prefix}/detokenize", json=back).json() == {"prompt": text}


def test_the_tokenizer_is_told_with_the_template_in_use(worker: Running) -> None:
    found = ask(worker, "GET", "/tokenizer_info?model=near").json()
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["eos_token"] == "<|im_end|>"
    assert found["chat_template"] == ChatTemplate.load(PENNY).source
    end = found["added_tokens_decoder"][str(TOKENIZER.eos_token_id)]
    assert (end["content"], end["special"]) == ("<|im_end|>", True)
    assert "<|im_start|>" in found["additional_special_tokens"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"model": "near", "prompt": "x"}),
        ("POST", "/detokenize", {"model": "near", "tokens": [5]}),
        ("GET", "/tokenizer_info?model=near", None),
    ],
)
def test_tokenizers_are_for_keys_with_their_scope(
    worker: Running, method: str, path: str, body: Any
) -> None:
    assert ask(worker, method, path, key=None, json=body).status_code == 401
    assert ask(worker, method, path, key=worker.nothing, json=body).status_code == 403
    far = path.replace("near", "far")
    refused = ask(worker, method, far, json=body and {**body, "model": "far"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")


def test_who_names_no_model_means_the_only_one_that_it_may_use(worker: Running) -> None:
    made = worker.post(
        "/v1/admin/keys",
        name="near",
        project_id=worker.project_id,
        scopes=["inference"],
        models=["near"],
    )
    key = made["value"]
    options: Any = {"max_tokens": 3}
    for unnamed in ({}, {"model": None}):
        asked = {"messages": HELLO, **unnamed, **options}
        answer = ask(worker, "POST", "/v1/chat/completions", key=key, json=asked)
        assert answer.json()["model"] == "near", answer.text
        refused = ask(worker, "POST", "/v1/chat/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    answer = ask(worker, "POST", "/v1/completions", key=key, json={"prompt": "x", **options})
    assert answer.json()["model"] == "near"
    answer = ask(worker, "POST", "/v1/responses", key=key, json={"input": "x", "store": False})
    assert answer.json()["model"] == "near", answer.text
    assert ask(worker, "POST", "/v1/embeddings", key=key, json={"input": "x"}).ok
    assert ask(worker, "POST", "/tokenize", key=key, json={"prompt": "x"}).ok
    assert ask(worker, "GET", "/tokenizer_info", key=key).ok
    named = json.dumps({"messages": HELLO, "model": "far"})
    assert ask(worker, "POST", "/v1/chat/completions", key=key, data=named).status_code == 404

"""The routes and defaults that vLLM's clients rely on, as a whole worker serves them: whose health,
version and tokenizer it is, and what a request without a model means."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import requests

from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from gateway.app.create import behind
from tests.gateway.fleet.upstream.scripted_upstream import Exchange
from tests.gateway.routes.openapi.running import ROOT, TIMEOUT_S, Running
from tests.journeys.upstreams import good

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


def chat(worker: Running, **fields: Any) -> Any:
    body = {"model": "near", "messages": HELLO, "max_tokens": 5, "seed": 1, **fields}
    answer = ask(worker, "POST", "/v1/chat/completions", json=body)
    assert answer.ok, answer.text
    if not fields.get("stream"):
        return answer.json()
    events = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def complete(worker: Running, **fields: Any) -> Any:
    body = {"model": "near", "prompt": "Hello you.", "max_tokens": 5, "seed": 1, **fields}
    answer = ask(worker, "POST", "/v1/completions", json=body)
    assert answer.ok, answer.text
    if not fields.get("stream"):
        return answer.json()
    events = answer.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("ask_for", [chat, complete])
def test_every_chunk_says_the_usage_so_far(worker: Running, ask_for: Any) -> None:
    for options, continuous in (
        ({"include_usage": True, "continuous_usage_stats": True}, True),
        ({"include_usage": True}, False),
        ({"continuous_usage_stats": True}, False),
    ):
        chunks = ask_for(worker, stream=True, stream_options=options)
        if not options.get("include_usage"):
            assert all("usage" not in chunk for chunk in chunks)
            continue
        *said, last = [chunk["usage"] for chunk in chunks]
        assert last["completion_tokens"] == 5
        if not continuous:
            assert set(map(str, said)) == {"None"}
            continue
        counts = [usage["completion_tokens"] for usage in said]
        assert counts == sorted(counts) and counts[-1] == 5
        assert {usage["prompt_tokens"] for usage in said} == {last["prompt_tokens"]}
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            for usage in said
        )
        if ask_for is chat:
            assert (chunks[0]["choices"][0]["delta"]["content"], counts[0]) == ("", 0)
        ended = chunks[-2]["choices"][0]
        assert ended["finish_reason"] == "length"
        assert ended["delta"]["content"] if ask_for is chat else ended["text"]


def test_an_upstreams_chunks_say_the_usage_so_far_and_it_hears_nothing_of_that(
    worker: Running,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chat(worker, model="far", stream=True, stream_options=options, priority=-5)
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > 0
    sent = worker.far.exchanges[-1].body
    assert sent["stream_options"] == {"include_usage": True}
    assert "priority" not in sent


@pytest.mark.parametrize("ask_for", [chat, complete])
def test_token_ids_are_told_exactly_whole_and_streamed(worker: Running, ask_for: Any) -> None:
    whole = ask_for(worker, return_token_ids=True, n=2)
    prompts = [
        whole.get("prompt_token_ids") or each["prompt_token_ids"] for each in whole["choices"]
    ]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == whole["usage"]["prompt_tokens"]
    generated = [each["token_ids"] for each in whole["choices"]]
    assert [len(each) for each in generated] == [5, 5]
    assert "Hello" in TOKENIZER.decode(prompts[0])

    chunks = ask_for(worker, return_token_ids=True, n=2, stream=True)
    found: list[list[int]] = [[], []]
    told: list[list[int]] = []
    for chunk in chunks:
        told += [chunk["prompt_token_ids"]] if "prompt_token_ids" in chunk else []
        for choice in chunk["choices"]:
            told += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
            found[choice["index"]] += choice.get("token_ids", [])
    assert found == generated
    assert told == [prompts[0]] * (1 if ask_for is chat else 2)

    declined, unsaid = ask_for(worker, return_token_ids=False), ask_for(worker)
    assert declined["choices"][0]["token_ids"] is None
    assert "token_ids" not in unsaid["choices"][0] and "prompt_token_ids" not in unsaid


@pytest.mark.parametrize("ask_for", [chat, complete])
def test_a_prompts_log_probabilities_are_vllms(worker: Running, ask_for: Any) -> None:
    whole = ask_for(worker, prompt_logprobs=2, return_token_ids=True)
    choice = whole["choices"][0]
    logprobs = whole.get("prompt_logprobs") or choice["prompt_logprobs"]
    token_ids = whole.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert logprobs[0] is None and len(logprobs) == len(token_ids)
    for token_id, entry in zip(token_ids[1:], logprobs[1:], strict=True):
        first, *_ = entry.items()
        text = TOKENIZER.token_bytes(token_id).decode(errors="replace")
        assert first == (str(token_id), {"logprob": -0.5, "rank": 1, "decoded_token": text})
        assert len(entry) == 2
    none = ask_for(worker, prompt_logprobs=0)
    none = none.get("prompt_logprobs") or none["choices"][0]["prompt_logprobs"]
    assert [len(each) for each in none[1:]] == [1] * (len(token_ids) - 1)
    assert none[1][str(token_ids[1])]["rank"] == 1
    most = ask_for(worker, prompt_logprobs=20)
    most = most.get("prompt_logprobs") or most["choices"][0]["prompt_logprobs"]
    ranks = [[entry["rank"] for entry in each.values()] for each in most[1:]]
    assert ranks == [list(range(1, 21))] * len(ranks)


def test_an_echo_says_fewer_of_the_likeliest_than_the_prompts_log_probabilities(
    worker: Running,
) -> None:
    choice = complete(worker, echo=True, logprobs=1, prompt_logprobs=3)["choices"][0]
    assert all(len(each) <= 2 for each in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(each) == 3 for each in choice["prompt_logprobs"][1:])


def test_tokens_are_named_by_their_ids(worker: Running) -> None:
    named = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(worker, logprobs=True, top_logprobs=1, **named)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert content[0]["bytes"] == list(TOKENIZER.token_bytes(choice["token_ids"][0]))
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]

    choice = complete(worker, logprobs=1, echo=True, **named)["choices"][0]
    token_ids = choice["prompt_token_ids"] + choice["token_ids"]
    names = [f"token_id:{token_id}" for token_id in token_ids]
    assert choice["logprobs"]["tokens"] == names
    assert [next(iter(each)) for each in choice["logprobs"]["top_logprobs"][1:]] == names[1:]
    streamed = complete(worker, logprobs=1, stream=True, **named)
    streamed_names = [each for c in streamed for each in c["choices"][0]["logprobs"]["tokens"]]
    assert streamed_names == names[-5:]


def test_named_tokens_stand_in_the_place_of_the_likeliest(worker: Running) -> None:
    fields = {"logprob_token_ids": [7, 5], "return_tokens_as_token_ids": True}
    content = chat(worker, logprobs=True, **fields)["choices"][0]["logprobs"]["content"]
    names = ["token_id:7", "token_id:5"]
    assert [[top["token"] for top in each["top_logprobs"]] for each in content] == [names] * 5
    found = complete(worker, logprobs=1, **fields)["choices"][0]["logprobs"]
    assert [list(each)[-2:] for each in found["top_logprobs"]] == [names] * 5
    refused = ask(
        worker,
        "POST",
        "/v1/chat/completions",
        json={
            "model": "near",
            "messages": HELLO,
            "logprobs": True,
            "logprob_token_ids": [4096],
        },
    )
    assert refused.json()["error"]["param"] == "logprob_token_ids"


def test_the_beginning_of_an_answer_is_said_again(worker: Running) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "I am "}]
    fields = {"messages": begun, "continue_final_message": True, "return_token_ids": True}
    plain, echoed = chat(worker, **fields), chat(worker, echo=True, **fields)
    text = plain["choices"][0]["message"]["content"]
    assert echoed["choices"][0]["message"]["content"] == f"I am {text}"
    assert TOKENIZER.decode(plain["prompt_token_ids"], False).endswith("assistant\nI am ")
    chunks = chat(worker, echo=True, stream=True, **fields)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == f"I am {text}"
    asked = {"model": "near", "messages": begun, "continue_final_message": True}
    told = ask(worker, "POST", "/tokenize", json={**asked, "return_token_strs": False}).json()
    assert told["tokens"] == plain["prompt_token_ids"]


def test_special_tokens_are_text_where_they_are_not_skipped(worker: Running) -> None:
    for seed in range(64):
        asked: Any = {"prompt": [5, 6], "seed": seed, "max_tokens": 400}
        choice = complete(worker, return_token_ids=True, **asked)["choices"][0]
        special = TOKENIZER.special_ids.intersection(choice["token_ids"])
        if special:
            break
    assert special, "the engine said none"
    shown = complete(worker, skip_special_tokens=False, **asked)["choices"][0]["text"]
    assert choice["text"] == TOKENIZER.decode(choice["token_ids"])
    assert shown == TOKENIZER.decode(choice["token_ids"], False) != choice["text"]


def test_a_text_that_is_to_follow_a_form_says_which_one_cannot_be(worker: Running) -> None:
    """The engine here has no grammars, and the client knows the field that it sent."""
    for param, field in (
        ("structured_outputs.regex", {"structured_outputs": {"regex": "a+"}}),
        ("guided_choice", {"guided_choice": ["a"]}),
        ("response_format", {"response_format": {"type": "json_object"}}),
    ):
        body = {"model": "near", "prompt": "x", "prompt_embeds": [], **field}
        refused = ask(worker, "POST", "/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_as_many_of_the_likeliest_as_vllm_says_of_a_completion(worker: Running) -> None:
    told = complete(worker, logprobs=20, echo=True)["choices"][0]["logprobs"]["top_logprobs"]
    assert told[0] is None and {len(each) for each in told[1:]} == {20}
    body = {"model": "near", "prompt": "x", "logprobs": 21}
    assert ask(worker, "POST", "/v1/completions", json=body).json()["error"]["param"] == "logprobs"


def test_an_invocation_is_what_its_body_is_of(worker: Running) -> None:
    options: Any = {"model": "near", "seed": 1, "max_tokens": 3}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {**options, "messages": HELLO},
        "/v1/completions": {**options, "prompt": "x"},
        "/v1/embeddings": {"model": "near", "input": "x"},
    }
    for path, body in bodies.items():
        there = ask(worker, "POST", path, json=body).json()
        here = ask(worker, "POST", "/invocations", json=body).json()
        assert here.keys() == there.keys()
        for told in {"choices", "data", "usage"}.intersection(there):
            assert here[told] == there[told]
    neither = ask(worker, "POST", "/invocations", json=options)
    assert (neither.status_code, neither.json()["error"]["param"]) == (400, "messages")
    assert ask(worker, "POST", "/invocations", key=None, json=options).status_code == 401
    assert ask(worker, "POST", "/invocations", key=worker.nothing, json=options).status_code == 403


def test_the_load_is_what_is_under_way(worker: Running) -> None:
    gate, body = threading.Event(), {"model": "far", "messages": HELLO}

    async def wait(exchange: Exchange) -> None:
        await asyncio.to_thread(gate.wait, TIMEOUT_S)
        await good(exchange)

    def until_it_is(load: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while ask(worker, "GET", "/load", key=None).json() != {"server_load": load}:
            assert time.monotonic() < deadline

    until_it_is(0)
    worker.far.script = wait
    try:
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask, worker, "POST", "/v1/chat/completions", json=body)
            until_it_is(1)
            gate.set()
            assert asked.result(TIMEOUT_S).ok
    finally:
        gate.set()
        worker.far.script = good
    until_it_is(0)


def test_refusals_have_the_words_that_clients_look_for(worker: Running) -> None:
    """OpenAI's own, which vLLM repeats, and vLLM's where only it says so."""

    def refused(method: str, path: str, status: int, **body: Any) -> str:
        answer = ask(worker, method, path, json=body or None)
        assert answer.status_code == status, answer.text
        return str(answer.json()["error"]["message"])

    asked = {"model": "near", "input": "x"}
    there = ask(worker, "POST", "/v1/responses", json={**asked, "max_output_tokens": 3}).json()[
        "id"
    ]
    cancelled = refused("POST", f"/v1/responses/{there}/cancel", 400)
    assert cancelled == "Cannot cancel a synchronous response."
    unknown = refused("GET", "/v1/responses/resp_0", 404)
    assert unknown == "Response with id 'resp_0' not found."
    unkept = refused("POST", "/v1/responses", 400, **asked, background=True, store=False)
    assert unkept == "background can only be used when `store` is true."
    for path, fields in (
        ("/v1/completions", {"prompt": [4096]}),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {"4096": 1}}),
    ):
        message = refused("POST", path, 400, model="near", **fields)
        assert message.endswith("token id 4096 is out of vocabulary: this model has 4096.")


def in_vllms_dialect(worker: Running) -> AbstractContextManager[None]:
    return worker.routing(speaks_vllm=True)


def test_answers_have_a_place_for_all_that_vllm_can_tell(worker: Running) -> None:
    with in_vllms_dialect(worker):
        whole, text = chat(worker), complete(worker)
        told = chat(worker, prompt_logprobs=0, return_token_ids=True)
        chunks = [chat(worker, stream=True), complete(worker, stream=True)]
    assert (whole["prompt_logprobs"], whole["prompt_token_ids"]) == (None, None)
    choice = whole["choices"][0]
    assert (choice["token_ids"], choice["message"]["reasoning_content"]) == (None, None)
    names = ("prompt_logprobs", "prompt_token_ids", "token_ids")
    assert [text["choices"][0][name] for name in names] == [None] * 3
    assert told["prompt_logprobs"] and told["prompt_token_ids"] and told["choices"][0]["token_ids"]
    for last in (streamed[-1]["choices"][0] for streamed in chunks):
        assert last["finish_reason"] == "length"
        assert last["delta"]["content"] if "delta" in last else last["text"]
    plain = chat(worker)
    assert plain.keys().isdisjoint(names) and "token_ids" not in plain["choices"][0]


def test_a_role_of_another_name_reaches_the_template_in_vllms_dialect(worker: Running) -> None:
    messages = [{"role": "my-role", "content": "x"}]
    with in_vllms_dialect(worker):
        told = chat(worker, messages=messages, return_token_ids=True)
        asked = {"model": "near", "messages": messages}
        assert (
            ask(worker, "POST", "/tokenize", json=asked).json()["tokens"]
            == (told["prompt_token_ids"])
        )
    assert "<|im_start|>my-role\nx<|im_end|>" in TOKENIZER.decode(told["prompt_token_ids"], False)
    body = {"model": "near", "messages": messages}
    refused = ask(worker, "POST", "/v1/chat/completions", json=body)
    assert refused.json()["error"]["param"] == "messages[0].role"


def test_a_path_that_a_proxy_leaves_is_passed_over(
    worker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"model": "near", "messages": HELLO, "max_tokens": 3, "seed": 1}
    assert ask(worker, "POST", "/llm/v1/chat/completions", json=asked).status_code == 404
    monkeypatch.setattr(worker.app, "asgi_handler", behind("/llm", worker.app.asgi_handler))
    for path in ("/v1/chat/completions", "/llm/v1/chat/completions"):
        assert ask(worker, "POST", path, json=asked).ok
        assert ask(worker, "POST", path, key="wrong", json=asked).status_code == 401
    near = ask(worker, "GET", "/llm/v1/models/near").json()
    assert near == ask(worker, "GET", "/v1/models/near").json()
    for path in ("/llm", "/llmv1/models", "/llm/llm/v1/models"):
        assert ask(worker, "GET", path).status_code == 404, path

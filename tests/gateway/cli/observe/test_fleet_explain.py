"""`tollgate fleet explain` says why a request went to its replica, or why nobody knows."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.cli.shared.fake_gateway import serving

ID = "req_" + "0" * 32
PATH = f"/v1/requests/{ID}"
CANDIDATES = [
    {
        "replica": "1",
        "predicted_ttft_s": 0.012,
        "cached_tokens": 128,
        "fetched_tokens": 1024,
        "fetched_from": "0",
    },
    {
        "replica": "0",
        "predicted_ttft_s": 1.5,
        "cached_tokens": 1152,
        "fetched_tokens": 0,
        "fetched_from": None,
    },
]
LOG = {
    "model": "penny",
    "lane": "interactive",
    "status": 200,
    "tokens": {"uncached": 100, "cached": 1152, "written": 0, "output": 9},
    "timing": {"ttft_ms": 14.2},
}
ATTEMPTS = [{"name": "attempt", "about": f"penny/{each}"} for each in (1, 0)]
ROUTING: list[dict[str, Any]] = [{"reason": "least_work", "candidates": CANDIDATES, "split": None}]


FOUND = [{"pool": 128, "tier": 0, "fetched": 1024}, {"pool": 0, "tier": 0, "fetched": 0}]


def whole(**fields: Any) -> dict[str, Any]:
    told = {"log": LOG, "stages": ATTEMPTS, "routing": ROUTING, "found_cached": FOUND, "bill": None}
    return {"id": ID, **told, **fields}


def test_a_gateway_that_tells_no_choices() -> None:
    with serving() as gateway:
        gateway.on("GET", PATH, {name: each for name, each in whole().items() if name != "routing"})
        done = gateway.run("fleet", "explain", ID)
        assert done.exit_code == 2 and done.output.count("\n") == 1
        assert "has no choices of replicas in its log of requests" in done.output


def test_each_candidate_has_a_row_and_the_reason_words() -> None:
    with serving() as gateway:
        gateway.on("GET", PATH, whole())
        done = gateway.run("fleet", "explain", ID)
        assert done.exit_code == 0, done.output
        said = done.output.splitlines()
        assert "Ran on        penny/1, then penny/0" in said
        assert "Prompt        1252 tokens, 1152 billed as cached" in said
        assert "Found cached  128 in its KV cache, 1024 at another replica; then 0" in said
        assert "least_work: it was predicted the soonest" in said
        assert said[-2].split() == ["1", "12.0", "ms", "128", "1024", "0"]
        assert said[-1].split() == ["0", "1.50", "s", "1152", "0", "-"]
        found = json.loads(gateway.run("fleet", "explain", ID, "--json").output)
        assert found["routing"] == ROUTING and found["found_cached"] == FOUND
        assert found["ran_on"] == ["penny/1", "penny/0"]
        assert (found["input_tokens"], found["cached_tokens"], found["ttft_ms"]) == (
            1252,
            1152,
            14.2,
        )


def test_it_names_the_replicas_that_share_a_prompt() -> None:
    split = {"prefill": "1", "decode": "0", "transfer_s": 0.004}
    with serving() as gateway:
        routing = [{**ROUTING[0], "reason": "split", "split": split}]
        gateway.on("GET", PATH, whole(routing=routing))
        said = gateway.run("fleet", "explain", ID).output.splitlines()
    assert "prefill at 1, decode at 0, 4.0 ms to read the KV" in said


def test_it_says_where_a_request_waited_that_moved() -> None:
    with serving() as gateway:
        moved = {**ROUTING[0], "reason": "moved", "moved": {"replica": "0", "left_s": 4.2}}
        gateway.on("GET", PATH, whole(routing=[*ROUTING, moved]))
        said = gateway.run("fleet", "explain", ID).output.splitlines()
    assert any(line.startswith("moved: it waited at another replica") for line in said)
    assert "at 0 it had 4.20 s left" in said


def test_it_says_why_there_is_nothing_to_explain() -> None:
    refused = {**LOG, "status": 429}
    for fields, line in (
        ({"log": None, "stages": []}, "its row is gone from the log"),
        ({"stages": ATTEMPTS[:1]}, "no choice to explain: it ran on penny/1"),
        ({"log": refused, "stages": []}, "it went to no replica: its status is 429"),
    ):
        with serving() as gateway:
            gateway.on("GET", PATH, whole(routing=[], **fields))
            done = gateway.run("fleet", "explain", ID)
            assert done.exit_code == 1 and line in done.output, done.output


def test_an_unknown_id_is_told_in_a_line() -> None:
    with serving() as gateway:
        gateway.on("GET", PATH, {"title": "No such request."}, status=404)
        done = gateway.run("fleet", "explain", ID)
        assert done.exit_code != 0 and "No such request." in done.output, done.output

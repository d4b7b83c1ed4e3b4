"""`tollgate fleet explain`: why a request went to its replica, and what came of the prediction.

Read from the running gateway: GET /v1/requests/{id}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from gateway.cli.observe.requests import REQUESTS, input_of, to_ms
from gateway.cli.shared.tables import ABSENT, Column, Output, printable, show, with_output
from gateway.cli.shared.target import OTHER_ORG, Gateway, GatewayError, examples, with_gateway

WHY = {
    "cached": "it was predicted the soonest, and had more of the prompt cached than another",
    "least_work": "it was predicted the soonest",
    "spread": "another was as soon or sooner, but holds up more requests or did more lately",
    "key": "the client's cache key leads there",
    "cell_down": "no engine of this cell was up, so one that another cell lends was asked",
    "cell_late": "this cell would have been late, and one that another cell lends is much sooner",
    "moved": "it waited at another replica, and this one was predicted to be much sooner",
    "split": "one computes the prompt and says the first token, another one goes on",
}
FOUND = {
    "pool": "in its KV cache",
    "tier": "in host memory or on disk",
    "fetched": "at another replica",
}
CANDIDATES = (
    Column("REPLICA", "replica"),
    Column("PREDICTED", "predicted_ttft_s", "number",
           show=lambda row: to_ms(1000 * row["predicted_ttft_s"])),
    Column("CACHED", "cached_tokens", "number"),
    Column("FETCHED", "fetched_tokens", "number"),
    Column("OF", "fetched_from", show=lambda row: row["fetched_from"] or ABSENT),
)  # fmt: skip


@click.command(epilog=examples("tollgate fleet explain req_0192...",
                               "tollgate fleet explain req_0192... --json"))  # fmt: skip
@with_gateway
@with_output
@OTHER_ORG
@click.argument("request_id", metavar="REQUEST")
async def explain(gateway: Gateway, request_id: str, org: str | None, output: Output) -> None:
    """Explain why a request went to its replica, by the id that its client saw as `x-request-id`.

    The chosen replica stands first, then those that would have been asked after it. PREDICTED: the
    time to the first token. CACHED: tokens of the prompt in the replica's own cache. FETCHED: more
    of them that it would have read from the cache of another replica.
    """
    org_id = await gateway.org_id(org)
    found = await gateway.get(f"{REQUESTS}/{request_id}", org_id=org_id)
    if "routing" not in found:
        raise gateway.too_old("choices of replicas in its log of requests")
    routing = found["routing"]
    if not routing:
        raise GatewayError(f"{found['id']}: {no_choice(found)}", status=1)
    if output.form == "json":
        show([told_of(found)], (), output)
        return
    if output.form == "table":
        for line in facts_of(found):
            click.echo(line)
    for choice in routing:
        if output.form == "table":
            reason = choice["reason"]
            click.echo(f"\n{printable(reason)}: {WHY.get(reason, 'no other word for it here')}")
            if (split := choice["split"]) is not None:
                parts = f"prefill at {split['prefill']}, decode at {split['decode']}"
                read = to_ms(1000 * split["transfer_s"])
                click.echo(f"{printable(parts)}, {read} to read the KV")
            if (moved := choice.get("moved")) is not None:
                left = to_ms(1000 * moved["left_s"])
                click.echo(f"at {printable(moved['replica'])} it had {left} left")
        show(choice["candidates"], CANDIDATES, output)


def no_choice(found: Mapping[str, Any]) -> str:
    """Return why nothing is known of how a request was routed."""
    if found["log"] is None:
        return "its row is gone from the log of requests, and the choice with it"
    replicas = ran_on(found)
    if replicas:
        return f"there was no choice to explain: it ran on {', '.join(replicas)}"
    return f"it went to no replica: its status is {found['log']['status']}"


def ran_on(found: Mapping[str, Any]) -> list[str]:
    """Return the replicas that it was tried on, in order."""
    return [each["about"] for each in found["stages"] if each["name"] == "attempt"]


def told_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a request's way, as one object."""
    log = found["log"]
    return {
        "id": found["id"],
        "model": log["model"],
        "lane": log["lane"],
        "ran_on": ran_on(found),
        "input_tokens": input_of(log),
        "cached_tokens": log["tokens"]["cached"],
        "found_cached": found["found_cached"],
        "ttft_ms": log["timing"]["ttft_ms"],
        "routing": found["routing"],
    }


def facts_of(found: Mapping[str, Any]) -> Iterator[str]:
    told = told_of(found)
    tried = ", then ".join(told["ran_on"]) or ABSENT
    facts = {
        "Request": told["id"],
        "Model": f"{told['model']}, lane {told['lane']}",
        "Ran on": tried,
        "Prompt": f"{told['input_tokens']} tokens, {told['cached_tokens']} billed as cached",
        "Found cached": "; then ".join(map(tokens_of, told["found_cached"])) or ABSENT,
        "First token": to_ms(told["ttft_ms"]),
    }
    return (f"{name:<12}  {printable(text)}" for name, text in facts.items())


def tokens_of(found: Mapping[str, int]) -> str:
    """Return where an attempt found the cached tokens of its prompt."""
    return (
        ", ".join(f"{found[name]} {words}" for name, words in FOUND.items() if found[name]) or "0"
    )

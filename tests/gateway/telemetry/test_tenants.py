"""Organizations are counted by name up to a bound, the same ones in every process of a host, and
nothing is lost of the others."""

from __future__ import annotations

from collections import Counter
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.events import Attempt, Kind, Price, Quantities, UsageEvent
from gateway.processes.supervisor import cut_metrics
from gateway.telemetry import tenants
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.tenants import (
    COUNTS_BYTES,
    NAMES_BYTES,
    TOKEN_KINDS,
    TenantCounts,
    TenantNumbers,
)
from tests.budget import examples
from tests.scratch import scratch_for_a_while

LISTED = [each for each in Telemetry(models=()).listed if each.group == "Tenants"]
BOUND = 3


def counted(made: TenantCounts, metric: str = "requests") -> dict[tuple[str, ...], float]:
    """The counts above zero, by the values of their labels."""
    [found] = (each for each in made.collect() if each.name == f"tollgate_tenant_{metric}")
    return {tuple(each.labels.values()): each.value for each in found.samples if each.value}


def used(org: str, kind: Kind = "usage") -> UsageEvent:
    quantities = Quantities(
        uncached_input=2, embedding_input=1, cache_read=5, cache_write_5m=7, output=11,
        reasoning_output=13,
    )  # fmt: skip
    attempt = Attempt(
        id="a", request_id="r", org=org, project="p", key="k", model="m", admitted_at=0.0,
        prices={"output": Price(price_id="out", pico_per_token=10**9)},
    )  # fmt: skip
    return UsageEvent(attempt=attempt, quantities=quantities, occurred_at=0.0, kind=kind)


async def test_usage_is_counted_by_who_pays_for_it_once_it_is_booked() -> None:
    telemetry = Telemetry(models=["m"], counts_tenants=True)
    await telemetry.booked([used("alice"), used("alice"), used("bob"), used("bob", "waste")])
    assert telemetry.tenants is not None
    assert counted(telemetry.tenants, "tokens") == {
        (org, kind): times * count
        for org, times in (("alice", 2), ("bob", 1))
        for kind, count in zip(TOKEN_KINDS, (3, 5, 7, 24), strict=True)
    }
    assert counted(telemetry.tenants, "spend_usd") == {("alice",): 0.048, ("bob",): 0.024}
    line = 'tollgate_tenant_spend_usd_total{org="bob"} 0.024'
    assert line in telemetry.render().content.decode().splitlines()
    assert "tollgate_tenant" not in Telemetry(models=["m"]).render().content.decode()


def test_requests_are_counted_by_how_they_ended() -> None:
    made = TenantCounts(None, LISTED)
    for status in (200, 204, 302, 499, 402, 429, 400, 404, 500, 503):
        made.answered("alice", status)
    assert counted(made) == {
        ("alice", "answered"): 4,
        ("alice", "limited"): 2,
        ("alice", "refused"): 2,
        ("alice", "failed"): 2,
    }


@given(asked=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcdef")), max_size=40))
@settings(max_examples=examples(60))
def test_each_organization_has_one_label_in_all_processes(asked: list[tuple[int, str]]) -> None:
    """Each process here is one that the test plays. The first BOUND that any of them saw have a
    label; a worker that starts anew takes up what it had."""
    with pytest.MonkeyPatch.context() as patched, scratch_for_a_while() as made:
        patched.setattr(tenants, "MAX_TENANTS", BOUND)
        folder = Path(made)
        processes = []
        for number in range(3):
            patched.setattr("os.getpid", lambda number=number: number)
            processes.append(TenantCounts(folder, LISTED))
        for process, org in asked:
            processes[process].answered(org, 200)
        cut_metrics(folder / "tenants_0.shm")
        expected = Counter[tuple[str, ...]]()
        known = list(dict.fromkeys(org for _, org in asked))[:BOUND]
        for _, org in asked:
            expected[org if org in known else "-", "answered"] += 1
        assert all(counted(each) == expected for each in processes)
        patched.setattr("os.getpid", lambda: 0)
        again = TenantCounts(folder, LISTED)
        again.answered("z", 200)
        assert sum(counted(again).values()) == len(asked) + 1


def number_all(folder: Path, first: int) -> None:
    numbers = TenantNumbers(folder)
    for at in range(600):
        numbers.of(f"org_{(first + at) % 1200}")


def test_processes_that_number_at_once_agree(tmp_path: Path) -> None:
    running = [
        get_context("fork").Process(target=number_all, args=(tmp_path, first))
        for first in (0, 300, 600, 900)
    ]
    for each in running:
        each.start()
    for each in running:
        each.join()
        assert each.exitcode == 0
    names = TenantNumbers(tmp_path).names()
    assert len(names) == len({*names}) == tenants.MAX_TENANTS


def test_the_files_have_their_disk_space_and_odd_names_no_label(tmp_path: Path) -> None:
    made = TenantCounts(tmp_path, LISTED)
    for org in ("", "x" * 65, "y" * 64):
        made.answered(org, 200)
    assert counted(made) == {("-", "answered"): 2, ("y" * 64, "answered"): 1}
    assert sorted(each.stat().st_size for each in tmp_path.iterdir()) == [NAMES_BYTES, COUNTS_BYTES]
    assert all(each.stat().st_blocks * 512 >= each.stat().st_size for each in tmp_path.iterdir())

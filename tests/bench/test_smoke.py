"""The benchmarks of the main claims really run, small, and record nothing."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import wire
from bench.gateway import FIGURES, KINDS, SIDES, value
from bench.migrations.tables import TABLES
from bench.tools.record import RESULTS
from bench.tools.sampled import PARTS

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 480.0

pytestmark = pytest.mark.slow


def run(module: str, *arguments: str, small: str = "--dry") -> str:
    """Return what a benchmark prints; the recorded results stay as they are. small: the arguments
    for a small run."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    done = subprocess.run(
        [sys.executable, "-m", module, small, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before
    return done.stdout


def test_each_part_of_a_profile_is_there() -> None:
    """A moved folder's samples would count as somebody else's."""
    for place, part in PARTS:
        package, _, rest = place.partition("/")
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations, part
        assert (Path(found.submodule_search_locations[0]) / rest).exists(), place


@pytest.mark.nightly
def test_the_gateway_in_front_of_an_upstream() -> None:
    *lines, last = run("bench.gateway", "--seconds", "0.2").splitlines()
    for figure in FIGURES:
        figures = r"(?: +(?:[0-9,.-]+)){4} "
        assert any(re.match(re.escape(figure.title) + figures, line) for line in lines), lines
    result = json.loads(last)
    assert result["seconds_each"] == 0.2
    for side in SIDES:
        for kind in KINDS:
            closed = result[side][kind]["closed"]
            assert closed["requests"] > 0 and closed["errors"] == 0
        assert result[side]["whole"]["opened"]["requests"] == 4
    assert all(value(result, "gateway", figure) is not None for figure in FIGURES)
    assert value(result, "gateway", FIGURES[3]) > 0


@pytest.mark.nightly
def test_an_installation_that_has_grown() -> None:
    sizes = {"keys": 40, "orgs": 10, "models": 3, "ledger": 1_000}
    asked = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    *_, last = run("bench.growth", "--seconds", "0.3", "--rounds", "1", *asked).splitlines()
    result = json.loads(last)
    assert result["sizes"] == sizes
    assert result["times"]["serving"] > 0


@pytest.mark.nightly
def test_a_scrape_and_what_a_request_counts() -> None:
    table = run("bench.metrics", "--rounds", "1")
    for line in ("text, 1,000 organizations", "protobuf", "stream of 64 steps"):
        assert re.search(rf"^{line} +[0-9.]+", table, re.MULTILINE), table


def test_the_door() -> None:
    *table, last = run("bench.auth", "--rounds", "1").splitlines()
    assert re.search(r"^API key +[0-9.]+ +[0-9.]+ +15 +1.00$", "\n".join(table), re.MULTILINE)
    result = json.loads(last)
    assert result["queries"] == 0 and 0 < result["API key"]["median_us"] < 1000
    assert result["API key"]["best_us"] > result["open route"]["best_us"] > 0


def test_the_cache_report() -> None:
    *table, last = run("bench.cache_report", "--rounds", "1").splitlines()
    assert re.search(r"^cached +[0-9.]+ +[0-9.]+ +10$", "\n".join(table), re.MULTILINE)
    result = json.loads(last)
    assert result["cached"]["best_us"] > result["empty call"]["best_us"] > 0


def test_the_pages_of_the_console() -> None:
    said = run("bench.console", "--requests", "2000", "--repeat", "1")
    assert "2,000 requests; 66 rows of them" in said
    for name in ("overview, 24 hours", "requests, an error that none had", "one request"):
        assert re.search(rf"{name} +p50 +[\d.]+  p95 +[\d.]+ ms", said), said


def test_the_look_at_an_offer() -> None:
    *table, last = run("bench.mcp_offer", "--tools", "200", "--megabytes", "0.2").splitlines()
    result = json.loads(last)
    for stage in ("pin", "compare", "first page", "all"):
        assert re.search(rf"^{stage}(?: +[0-9.]+){{3}}$", "\n".join(table), re.MULTILINE)
        assert all(result[offer][stage] > 0 for offer in ("few", "many", "large"))
    assert (result["tools"], result["large_mb"]) == (200, 0.2)
    assert result["growth"].keys() == {"pin", "compare", "all"}


def test_the_wire() -> None:
    result = wire.run(num_chunks=8, rounds=1)
    tables = wire.shown(result).splitlines()
    assert set(result["chunk_us"]) == {"chat", "completions", "responses", "messages"}
    assert len(result["request_us"]) == 9
    for row, found in (result["chunk_us"] | result["request_us"]).items():
        assert all(figure > 0 for figure in found.values())
        assert any(line.startswith(f"{row} ") for line in tables)


@pytest.mark.nightly
def test_the_time_to_the_first_token_and_to_a_class() -> None:
    said = run("bench.start", "--starts", "2", "--parses", "2")
    found = re.search(r"first start ([0-9.]+) s, later starts ([0-9.]+) s", said)
    assert found is not None, said
    assert all(0 < float(seconds) < TIMEOUT_S for seconds in found.groups())
    assert re.search(r"^4 classes parsed: [0-9.]+ to [0-9.]+ s$", said, re.MULTILINE), said


@pytest.mark.nightly
@pytest.mark.parametrize("table", TABLES)
def test_the_waits_beside_migrations(table: str) -> None:
    said = run("bench.migrations", "--rows", "2000", "--tables", table)
    assert f"{table}: 2,000 rows" in said and "refused: 0" in said
    for phase in ("before", "during_migrations"):
        assert re.search(rf"^  {phase} +writer +asked [1-9]", said, re.MULTILINE), said


@pytest.mark.nightly
def test_the_engine_against_static_batching() -> None:
    arguments = ("--models", "15M", "--measures", "prefill 512", "decode 8", "--turns", "1")
    said = run("bench.engine_cpu", *arguments, "--peers", "static_transformers", "--threads", "1")
    for measure in ("prefill 512", "decode 8"):
        found = re.search(rf"{measure} +ours \d+ \(1.00; \d+%\) +\S.* \d+ \([0-9.]+; \d+%\)", said)
        assert found is not None, said
    assert "outside the model" in said


@pytest.mark.nightly
def test_the_cost_of_determinism() -> None:
    said = run("bench.engine.deterministic", "--device", "cpu", small="--quick")
    for what in ("prefill 512", "decode 1", "decode 8", "decode 32"):
        found = re.search(rf"{what} +default (\S+) +deterministic (\S+) +fraction (\S+)", said)
        assert found is not None, said
        assert all(float(figure) > 0 for figure in found.groups()), said

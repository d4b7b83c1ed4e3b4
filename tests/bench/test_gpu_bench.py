"""`make gpu-bench` and the tuner, tried in the interpreter; and the page they are drawn on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import page
from bench.gpu.findings import Lacking
from bench.gpu.floors import H200
from bench.gpu.models import LLAMA_8B, shape_of
from bench.gpu.place import Place
from bench.gpu.rows import peer_rows
from bench.gpu.rows.rows import ROWS, named, shown
from tests.bench.test_gpu_check import ROOT, run

TRIED = (
    "decode-attention",
    "prefill-attention-4k",
    "graphs",
    "decode-1-bf16",
    "host-gap",
    "mixed-fp8",
    "deterministic",
    "start",
    "replay",
)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    only = [argument for name in TRIED for argument in ("--only", name)]
    done = run(
        "bench.gpu_bench", "--device", "cpu", "--tiny", "--out", str(tmp_path), *only, timeout_s=290
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert set(result["rows"]) == set(TRIED)
    assert all(math.isfinite(row["figure"]) for row in result["rows"].values())
    assert result["roofline_measured"]


@pytest.mark.nightly
@pytest.mark.slow
def test_the_tuner_runs_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = run(
        "bench.engine.tune_kernels",
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "decode",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "decode d128: d64-m16 -> " in done.stdout
    (path,) = tmp_path.glob("*.json")
    assert set(json.loads(path.read_text())) <= {"decode_attention"}


def test_what_is_missing_is_said_in_one_line() -> None:
    """As on a machine that lacks a wheel: found by a child in which it cannot be imported."""
    code = (
        "import importlib.util, bench.gpu.place as p; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda n, *a: None if n == 'msgspec' else find(n, *a);"
        "p.place('cuda', tiny=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("not installed: msgspec; ") and done.stderr.count("\n") == 1


def test_the_page_is_drawn_from_what_is_recorded() -> None:
    """`python -m bench.gpu.page` after a change."""
    assert page.PAGE.read_text() == page.draw(page.newest())


def report(**rows: dict[str, Any]) -> dict[str, Any]:
    roofline = {name: getattr(H200, name) for name in H200.__slots__}
    return {
        "benchmark": "gpu",
        "at": "2026-12-01T10:00:00+00:00",
        "device": "NVIDIA H200",
        "software": "torch 2.11.0",
        "roofline": roofline,
        "roofline_measured": True,
        "rows": rows,
    }


def line_of(text: str, title: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return line


def test_a_page_says_what_was_reached_missed_and_not_measured() -> None:
    floor = 4.489e-3
    text = page.draw(
        report(
            **{
                "decode-32-bf16": {"figure": floor / 0.8},
                "mixed-fp8": {"figure": 11_000.0},
                "host-gap": {"figure": 0.02},
                "start": {"error": "TimeoutExpired: too long"},
                "replay": {"figure": 6.0, "detail": {"remark": "scaled down"}},
            }
        )
    )
    assert "Not measured yet" not in text
    decode = line_of(text, named("decode-32-bf16").title)
    assert "| 5.61 ms | 4.49 ms | 80% | >= 78% | reached |" in decode
    assert "missed" in line_of(text, named("mixed-fp8").title)
    gap = line_of(text, named("host-gap").title)
    assert "| 2.00 % | - | - | <= 3.00 % | reached |" in gap
    assert "TimeoutExpired" in line_of(text, named("start").title)
    assert "reached; scaled down" in line_of(text, named("replay").title)
    assert "not measured" in line_of(text, named("prefill-fp8").title)
    (bar,) = [line for line in text.splitlines() if line.startswith("decode-32-bf16 ")]
    assert bar.count("=") == 23 and bar.endswith(" 80%")


def test_without_a_run_the_page_has_floors_and_goals() -> None:
    text = page.draw(None)
    assert text.count("not measured yet") == len(ROWS)
    assert "| 3.52 ms | >= 82% |" in line_of(text, named("decode-1-bf16").title)


def test_the_newest_run_is_drawn(tmp_path: Path) -> None:
    assert page.newest(tmp_path) is None
    for at, device in (("2026-12-02", "later"), ("2026-12-01", "earlier")):
        (tmp_path / f"{device}.json").write_text(
            json.dumps(report() | {"at": at, "device": device})
        )
    (tmp_path / "other.json").write_text(json.dumps({"benchmark": "start", "at": "2027"}))
    found = page.newest(tmp_path)
    assert found is not None and found["device"] == "later"


def test_less_time_and_more_rate_are_better() -> None:
    assert named("decode-1-bf16").fraction(2.0, 1.0) == 0.5
    assert named("mixed-fp8").fraction(1.0, 2.0) == 0.5
    assert named("start").reached(14.0, None) and not named("start").reached(16.0, None)
    assert named("replay").reached(6.0, None) and not named("replay").reached(4.0, None)
    assert named("deterministic").reached(9.0, None) is None
    assert not named("mixed-fp8").reached(math.nan, 1.0)


def test_every_row_has_its_own_name_and_something_that_measures_it() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    floors = [row.floor(H200, shape_of(LLAMA_8B)) for row in ROWS if row.floor is not None]
    assert all(floor > 0 for floor in floors)
    assert shown(0.00352, "ms") == "3.52 ms" and shown(22_579.0, "tok/s") == "22,579 tok/s"


def test_the_widest_gaps_are_those_between_steps() -> None:
    """Two steps of two kernels; in a step a gap of 1, between them one of 5; one overlaps."""
    from bench.gpu.rows.engine_rows import idle_between

    busy = [(13.0, 14.0), (0.0, 2.0), (3.0, 5.0), (3.5, 4.0), (10.0, 12.0)]
    assert idle_between(busy, 2) == (5.0, 14.0)
    assert idle_between([(0.0, 2.0), (1.0, 3.0)], 2) == (0.0, 3.0)


def test_a_phase_of_the_start_up_table() -> None:
    from bench.gpu.rows.start_rows import seconds_of
    from engine.transport.startup import Startup

    startup = Startup()
    startup.spent("weights: read", 2.0, "1 GiB from disk, 3 GiB/s with all")
    startup.spent("graphs of decodes", 4.25)
    startup.took("graphs of decodes", 1 << 30)
    assert seconds_of(startup.table(), "graphs") == 4.25
    with pytest.raises(RuntimeError, match="no seconds of nothing"):
        seconds_of(startup.table(), "nothing")


class FakeTrial:
    """Fastest with a=2 and, then, b=3; what b=4 gives is wrong."""

    def __init__(self) -> None:
        self.tried: list[dict[str, int]] = []

    def ratio(self, config: dict[str, int]) -> float:
        self.tried.append(config)
        if config.get("b") == 4:
            return math.inf
        return 1.0 - 0.1 * (config.get("a") == 2) - 0.2 * (config.get("b") == 3)


def test_each_parameter_is_tried_with_the_best_of_those_before() -> None:
    from bench.engine.tune_kernels import tune

    trial, space = FakeTrial(), {"a": (1, 2), "b": (3, 4)}
    found = tune(trial, space, time.monotonic() + 60)  # type: ignore[arg-type]
    assert found == {"a": 2, "b": 3}
    assert trial.tried == [{"a": 1}, {"a": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]
    assert tune(FakeTrial(), {"b": (4,)}, time.monotonic() + 60) == {}  # type: ignore[arg-type]
    assert tune(FakeTrial(), space, time.monotonic() - 1) == {}  # type: ignore[arg-type]


def test_what_is_not_tried_again_stays() -> None:
    from bench.engine.tune_kernels import Table, merge

    table: Table = {"op": {"one": {"a": 1}, "two": {"a": 2}}, "other": {"x": {"b": 1}}}
    merge(table, "op", ["one"], {"a": 3})
    assert table["op"] == {"one": {"a": 3}, "two": {"a": 2}}
    merge(table, "op", ["one", "two"], {})
    assert table == {"other": {"x": {"b": 1}}}


class FakeGround:
    """So much is left of the budget; an engine is never wanted."""

    place = Place(torch.device("cpu"), tiny=False)
    shape = shape_of(LLAMA_8B)

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def core(self, kind: str) -> None:
        raise AssertionError("an engine was started")

    def drop(self) -> None:
        """There is none."""


def test_nothing_is_replayed_without_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_rows, "find_spec", lambda name: None)
    with pytest.raises(Lacking, match="transformers is not installed"):
        peer_rows.replay(FakeGround(1e9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left_s", "remark"), [(1e9, "2,000 requests"), (60.0, "scaled down: 400 of 2,000 requests")]
)
def test_the_replay_says_how_many_it_had(
    left_s: float, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_rows, "find_spec", lambda name: name)
    monkeypatch.setattr(peer_rows, "_ours", lambda ground, asked: {"tokens_per_s": 6.0})
    monkeypatch.setattr(
        peer_rows, "_theirs", lambda ground, asked: {"tokens_per_s": 2.0, "ended": len(asked)}
    )
    found = peer_rows.replay(FakeGround(left_s))  # type: ignore[arg-type]
    assert found["figure"] == 3.0 and found["detail"]["remark"] == remark

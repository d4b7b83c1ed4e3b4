"""The bench of roles with real engines says who wins by objectives, and on what machine."""

from __future__ import annotations

from pathlib import Path

from bench.fleet.pools.live_roles import Answered, features, has_token, table_of


def test_who_serves_more_in_time_wins_a_pair_of_objectives() -> None:
    quick_first = [Answered(0.1, 0.04)] * 9 + [Answered(9.0, 0.2)]
    quick_others = [Answered(0.4, 0.008)] * 10
    table = table_of({"one": quick_first, "two": quick_others})
    winners = {(row["ttft_s"], row["tpot_s"]): row["winner"] for row in table}
    assert winners[0.25, 0.05] == "one" and winners[0.5, 0.01] == "two"
    assert winners[5.0, 0.1] == "two" and winners[0.25, 0.005] == "alike"
    assert next(row["good"] for row in table if row["winner"] == "one") == {"one": 0.9, "two": 0.0}


def test_what_a_processor_has_is_told(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name : x\nflags\t\t: fpu avx2 avx512f avx512_vnni\nflags : amx_tile\n")
    assert features(info) == ["avx2", "avx512f", "avx512_vnni"]
    info.write_text("")
    assert features(info) == []


def test_only_what_shows_a_token_counts() -> None:
    assert has_token('{"choices": [{"delta": {"content": "a"}}]}')
    assert not has_token('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}')
    assert not has_token('{"choices": []}')

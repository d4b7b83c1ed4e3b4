"""The counts of engines: of one model after another, side by side, and of models that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from billing.reconciliation.agreement import EngineCount, Tokens
from engine.protocol import Usage
from engine.transport.usage_record import UsageRecord
from gateway.bookkeeping.engine_counts import engine_counts
from gateway.home import Home
from gateway.settings.models import AdapterConfig, ModelConfig

NEAR = ModelConfig(name="near/by", path=Path("/m"), engines=("unix:/e",), starts_engine=True)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    found.create()
    return found


def count(home: Home, model: str, number: int, **requests: int) -> None:
    """Have an engine count requests by what they generated; those named `open_*` stay open."""
    record = UsageRecord(home.usage_record(model, number))
    for name, generated in requests.items():
        record.note(name, Usage(prompt_tokens=10, generated_tokens=generated, prefilled=True))
        if not name.startswith("open_"):
            record.fold(name)
    record.close()


def test_engines_that_ran_side_by_side_have_one_count(home: Home) -> None:
    count(home, "near/by", 1, a=5, open_b=2)
    count(home, "near/by", 2, c=7)
    (found,) = engine_counts(home, [NEAR])
    assert (found.name, found.models) == ("near/by", {"near/by"})
    assert found.acknowledged == Tokens(20, 12)
    assert found.open == {"open_b": Tokens(10, 2)}
    assert set(found.recent) == {"a", "c"}
    assert (found.until, found.is_lost) == (None, False)


def test_a_model_that_is_gone_is_counted_with_the_adapters_that_it_had(home: Home) -> None:
    home.note_names_sold("near/by", ["law"])
    home.note_names_sold("near/by", ["tax"])
    count(home, "near/by", 1, a=5)
    (gone,) = engine_counts(home, [])
    assert gone.models == {"near/by", "law", "tax"}
    other = ModelConfig(
        name=NEAR.name,
        path=NEAR.path,
        engines=NEAR.engines,
        starts_engine=True,
        adapters=(AdapterConfig(name="art"),),
    )
    (now,) = engine_counts(home, [other])
    assert now.models == {"near/by", "law", "tax", "art"}


def test_a_model_that_is_an_upstreams_now_is_not_counted(home: Home) -> None:
    """The books hold what the upstream served under that name."""
    count(home, "near/by", 1, a=5)
    found: list[EngineCount] = engine_counts(home, [ModelConfig(name="near/by")])
    assert found == []


@pytest.mark.parametrize("name", ["m", "a/b", "x.record", "at@2", "m.record.1.lost", "ü m"])
def test_a_record_tells_its_model(home: Home, name: str) -> None:
    for number in (1, 2, 13):
        home.usage_record(name, number).touch()
    lost = home.usage_record(name).with_name(f"{home.usage_record(name).name}.17.lost")
    lost.touch()
    home.usage_record(name).with_name(f"{home.usage_record(name).name}.new").touch()
    (found,) = home.usage_records().items()
    assert found == (name, sorted(home.usage_record(name, number) for number in (1, 2, 13)))


def test_versions_of_a_model_have_one_count(home: Home) -> None:
    """The books do not say which of them a request was at."""
    for name, number in (("qwen", 5), ("next", 7), ("other", 9)):
        count(home, name, 1, **{f"of_{name}": number})
    home.note_names_sold("next", ["qwen"])
    other, both = sorted(engine_counts(home, []), key=lambda each: len(each.models))
    assert (other.name, other.models) == ("other", {"other"})
    assert both.models == {"qwen", "next"} and both.acknowledged == Tokens(20, 12)
    assert set(both.recent) == {"of_qwen", "of_next"}

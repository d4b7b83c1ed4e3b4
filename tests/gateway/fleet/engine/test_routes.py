"""A model's engines are replicas of it and of each of its adapters."""

from __future__ import annotations

from pathlib import Path

from engine.fake.engine import FakeCore, FakeEngine
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.engine.routes import engine_routes
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.settings.models import AdapterConfig, ModelConfig

ADDRESSES = ("unix:/engine-0.sock", "unix:/engine-3.sock")


def test_adapters_have_the_replicas_of_their_model(
    model_folder: Path, threads: PrepareThreads, tmp_path: Path
) -> None:
    marks = DrainMarks(tmp_path / "drain_marks")
    model = ModelConfig(
        name="m",
        path=model_folder,
        engines=ADDRESSES,
        starts_engine=True,
        adapters=(AdapterConfig(name="law"),),
    )
    engines = [FakeEngine(FakeCore()) for _ in ADDRESSES]
    routes = list(
        engine_routes(model, engines, threads, unheard, marks, KvIndex(tmp_path / "index"))
    )
    assert [(each.model, each.parent) for each in routes] == [("m", None), ("law", "m")]
    names = [[replica.name for replica in route.replicas] for route in routes]
    assert names == [["m/0", "m/3"], ["law/0", "law/3"]]
    replicas = [replica for route in routes for replica in route.replicas]
    assert len({id(each._tokenizer) for each in replicas}) == 1, "read once for all"  # type: ignore[attr-defined]
    marks.mark(3)
    assert [each.health().is_drained for each in replicas] == [False, True, False, True]

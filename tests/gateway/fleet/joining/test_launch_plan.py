"""Reads from settings what runs on Ray, and refuses what cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.fleet.joining.launch_plan import check_ray, plan_of, read_plan, write_plan
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings, load

PENNY = '[[model]]\nname = "penny"\npath = "models/penny"\njoined = 3\n'
LISTEN = '[fleet]\njoin_listen = "tcp:0.0.0.0:9400"\n'


def settings(folder: Path, text: str, ray: str | None = "auto") -> Settings:
    (folder / "tollgate.toml").write_text(text)
    return load({"config": folder / "tollgate.toml", "home": folder / "home", "ray": ray}, {})


def test_every_engine_that_may_join_runs_on_ray(tmp_path: Path) -> None:
    plan = plan_of(settings(tmp_path, LISTEN + PENNY), 9400)
    assert plan is not None and plan.cluster == "auto"
    assert (plan.join_host, plan.join_port) == (None, 9400), "Ray knows this machine's address"
    [model] = plan.models
    assert (model.name, model.engines, model.resources) == ("penny", 3, {"CPU": 1, "GPU": 0})
    given = dict(zip(model.arguments[::2], model.arguments[1::2], strict=True))
    assert given["--model"] == "models/penny", "what comes with Tollgate lies elsewhere there"
    assert "--role" not in given
    assert given["--num-threads"] == "1", "no more than Ray set aside"
    write_plan(tmp_path / "ray.json", plan)
    assert read_plan(tmp_path / "ray.json") == plan


def test_a_model_says_what_its_engines_take(tmp_path: Path) -> None:
    text = LISTEN.replace("0.0.0.0", "10.0.0.5") + PENNY
    text += '[model.ray]\nengines = 2\ncpus = 8\ngpus = 1\npath = "/m/penny"\n'
    plan = plan_of(settings(tmp_path, text + "resources = { nvme = 2 }\n"), 9400)
    assert plan is not None and plan.join_host == "10.0.0.5"
    [model] = plan.models
    assert (model.engines, model.resources) == (2, {"CPU": 8, "GPU": 1, "nvme": 2})
    assert model.arguments[:2] == ("--model", "/m/penny")


def test_a_model_of_a_hub_is_fetched_by_each_node(tmp_path: Path) -> None:
    text = LISTEN + PENNY.replace("models/penny", "org/other") + 'revision = "abc"\n'
    plan = plan_of(settings(tmp_path, text), 9400)
    assert plan is not None
    arguments = plan.models[0].arguments
    assert arguments[:2] == ("--model", "org/other")
    assert arguments[arguments.index("--revision") + 1] == "abc"
    version = f"sha256:{'0' * 64}"
    text = LISTEN + PENNY.replace("models/penny", "s3://models/x") + f'version = "{version}"\n'
    plan = plan_of(settings(tmp_path, text), 9400)
    assert plan is not None
    arguments = plan.models[0].arguments
    assert arguments[:2] == ("--model", "s3://models/x")
    assert arguments[arguments.index("--version") + 1] == version


def test_each_role_is_a_pool_of_its_own(tmp_path: Path) -> None:
    text = LISTEN + PENNY.replace("joined = 3", "joined = { prefill = 1, decode = 2 }")
    plan = plan_of(settings(tmp_path, text), 9400)
    assert plan is not None
    assert {each.pool: each.engines for each in plan.models} == {
        "penny, prefill": 1,
        "penny, decode": 2,
    }
    for each in plan.models:
        assert each.name == "penny", "the model that tokens are for"
        assert each.arguments[each.arguments.index("--role") + 1] == each.role
        assert "--peer-listen" in each.arguments, "engines of other nodes read of it"


@pytest.mark.parametrize("ray", [None, "auto"])
def test_nothing_runs_there_that_nobody_asked_for(tmp_path: Path, ray: str | None) -> None:
    text = LISTEN + PENNY + ("[model.ray]\nengines = 0\n" if ray else "")
    assert plan_of(settings(tmp_path, text, ray), 9400) is None


@pytest.mark.parametrize(
    ("text", "ray", "complaint"),
    [
        (PENNY.replace("joined = 3", "replicas = 2"), "auto", "ray: no model lets engines join"),
        (LISTEN + PENNY, "ray://head:10001", "'auto' or 'host:port'"),
        (LISTEN + PENNY + "[model.ray]\nengines = 4\n", "auto", "ray.engines: 4 of 3"),
        (LISTEN + PENNY + "[model.ray]\ncpus = 0\n", None, "ray: wants cpus, gpus or resources"),
        (LISTEN + PENNY + "[model.ray]\ngpus = 1.5\n", None, "ray.gpus: 1.5: a part of one"),
        (LISTEN + PENNY + "[model.ray.resources]\nGPU = 1\n", None, "ray.resources: those of"),
        (
            PENNY.replace("joined = 3", "") + "[model.ray]\ngpus = 1\n",
            None,
            r"model\[0\].ray: only beside `joined`",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, text: str, ray: str | None, complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        check_ray(settings(tmp_path, text, ray))


def test_ray_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_ray(settings(tmp_path, LISTEN + PENNY, None))
    with pytest.raises(SettingsError, match=r'pip install "tollgate\[ray\]"'):
        check_ray(settings(tmp_path, LISTEN + PENNY))


def test_the_gateway_imports_no_ray() -> None:
    code = (
        "import sys, gateway.app.worker, gateway.cli.main, gateway.processes.supervisor,"
        " gateway.processes.launching.engine_actor; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

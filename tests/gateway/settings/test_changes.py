"""The effect of each setting, and how changes are shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gateway.settings.changes import (
    EFFECTS,
    changes_between,
    needs_new_workers,
    refuse_what_is_fixed,
)
from gateway.settings.file import CompatConfig, LogsConfig, MetricsConfig, SettingsError, WrittenMcp
from gateway.settings.live import LiveSettings, live_part, with_live_part
from gateway.settings.load import Settings, load

FAR = '[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n'
PENNY = '[[model]]\nname = "penny"\npath = "models/penny"\n'
TWO = """[[model]]
name = "far"
[[model.replica]]
upstream = "http://127.0.0.1:1/v1"
[[model.replica]]
upstream = "http://127.0.0.1:2/v1"
weight = 2
"""
LISTED = '[[mcp.servers]]\nname = "docs"\nurl = "https://h.example/mcp"\ntaints = true\n'
DIVIDED = {"compat": CompatConfig, "logs": LogsConfig, "mcp": WrittenMcp, "metrics": MetricsConfig}
"""Tables whose keys have effects of their own."""
OF_THE_FILE = {
    "file_lanes": "says what the file gives, and has no effect of its own",
    "origins": "says where each of the others comes from",
}


def read(folder: Path, text: str) -> Settings:
    path = folder / "tollgate.toml"
    path.write_text(text)
    return load({"config": path, "home": folder / "home"}, {})


def shown(folder: Path, old: str, new: str) -> list[tuple[str, str]]:
    found = changes_between(read(folder, old), read(folder, new))
    return [(str(each), each.effect) for each in found]


def test_each_setting_says_what_its_change_takes() -> None:
    """A new field of the settings needs a line in EFFECTS: is it live, or fixed with a process?"""
    names = {name for name in Settings.__struct_fields__ if name not in DIVIDED | OF_THE_FILE}
    names |= {f"{table}.{key}" for table, of in DIVIDED.items() for key in of.__struct_fields__}
    assert set(EFFECTS) == names


def test_only_a_restart_changes_the_devices_that_engines_are_on(tmp_path: Path) -> None:
    text = FAR + "[fleet.planner]\nidle_s = 5\ndevices = [{ name = 'cpu', bytes = %d }]\n"
    texts = [FAR, text % 1, text % 2]
    plain, one, other = (read(tmp_path, each) for each in texts)
    effects = {each.path: each.effect for each in changes_between(plain, one)}
    assert effects == {"fleet.planner.idle_s": "workers", "fleet.planner.devices": "restart"}
    [change] = changes_between(one, other)
    assert (change.path, change.effect) == ("fleet.planner.devices[0].bytes", "restart")


def test_what_is_live_is_in_the_live_part_and_nothing_else() -> None:
    live = {name.partition(".")[0] for name, effect in EFFECTS.items() if effect == "live"}
    assert live == set(LiveSettings.__struct_fields__) - OF_THE_FILE.keys()


def test_what_a_process_fixes_stays_as_it_was(tmp_path: Path) -> None:
    old = read(tmp_path, FAR)
    text = 'workers = 2\n[compat]\nhosted_tools = "refuse"\nunknown_fields = "ignore"\n'
    new = read(tmp_path, text + '[mcp.stdio]\nisolation = "none"\n[deadlines]\nbatch = 9\n' + FAR)
    found = with_live_part(old, live_part(new))
    assert {each.effect for each in changes_between(old, found)} == {"live"}
    left = changes_between(found, new)
    assert {each.path for each in left} == {"compat.hosted_tools", "mcp.stdio.isolation", "workers"}
    assert {each.effect for each in left} == {"workers"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (FAR, FAR, []),
        (FAR, "port = 9\n" + FAR, [("~ port: 8000 -> 9", "restart")]),
        (FAR, "workers = 3\n" + FAR, [("~ workers: 1 -> 3", "workers")]),
        (PENNY, PENNY + "replicas = 2\n", [("+ models.penny.replicas = 2", "live")]),
        (
            PENNY,
            PENNY + "prefill = 1\ndecode = 2\n",
            [("+ models.penny.prefill = 1", "live"), ("+ models.penny.decode = 2", "live")],
        ),
        (
            PENNY + "replicas = 3\n",
            PENNY + "replicas = '1..4'\n",
            [('~ models.penny.replicas: 3 -> "1..4"', "live")],
        ),
        (
            PENNY + "replicas = 3\n",
            PENNY + "replicas = 2\n",
            [("~ models.penny.replicas: 3 -> 2", "live")],
        ),
        (
            PENNY,
            PENNY + 'engine = "tcp:localhost:9000"\n',
            [('+ models.penny.engine = "tcp:localhost:9000"', "live")],
        ),
        (
            FAR,
            FAR + "context_window = 9\n",
            [("+ models.far.context_window = 9", "live")],
        ),
        (
            FAR,
            FAR.replace("far", "near") + FAR,
            [('+ models.near = {upstream = "http://127.0.0.1:1/v1"}', "live")],
        ),
        (
            FAR,
            FAR.replace(":1/", ":2/") + 'upstream_model = "x"\n',
            [
                (
                    '~ models.far.upstream: "http://127.0.0.1:1/v1" -> "http://127.0.0.1:2/v1"',
                    "live",
                ),
                ('+ models.far.upstream_model = "x"', "live"),
            ],
        ),
        (
            TWO,
            TWO.replace("weight = 2", "weight = 3"),
            [("~ models.far.replica[1].weight: 2 -> 3", "live")],
        ),
        (
            FAR,
            FAR + "[deadlines]\nbatch = 900\n" + LISTED,
            [
                ("+ deadlines.batch = 900", "live"),
                ('+ mcp.servers.docs = {url = "https://h.example/mcp", taints = true}', "live"),
            ],
        ),
    ],
)
def test_a_change_is_shown_in_a_line(
    tmp_path: Path, old: str, new: str, expected: list[tuple[str, str]]
) -> None:
    assert shown(tmp_path, old, new) == expected


def test_the_order_of_models_means_nothing(tmp_path: Path) -> None:
    near = FAR.replace("far", "near")
    assert shown(tmp_path, FAR + near, near + FAR) == []


def test_no_secret_is_shown(tmp_path: Path) -> None:
    canary = "sesame"
    old = FAR + '[[mcp.servers]]\nname = "s"\ncommand = "/bin/true"\n'
    new = (
        f'database_url = "postgresql://u:{canary}@h/d"\n'
        + FAR.replace("http://", f"http://me:{canary}@").replace("/v1", f"/v1?key={canary}")
        + '[[mcp.servers]]\nname = "s"\ncommand = "/bin/true"\n'
        + f'args = ["--token={canary}"]\nenvironment = {{KEY = "{canary}"}}\n'
    )
    found = shown(tmp_path, old, new) + shown(tmp_path, FAR, new)
    assert found and canary not in str(found)


def test_a_new_secret_takes_new_workers(tmp_path: Path) -> None:
    """A process knows the variables that it was given when it was started."""
    old, new = read(tmp_path, FAR), read(tmp_path, FAR + 'api_key_env = "FAR_KEY"\n')
    assert needs_new_workers(old, new) and not needs_new_workers(new, old)
    assert not needs_new_workers(old, msgspec.structs.replace(old, plans=()))


def test_a_gateway_alone_refuses_what_takes_another_process(tmp_path: Path) -> None:
    old = read(tmp_path, FAR)
    refuse_what_is_fixed(old, read(tmp_path, FAR + "context_window = 9\n"))
    with pytest.raises(SettingsError, match="^max_batch_lines: needs a restart$"):
        refuse_what_is_fixed(old, read(tmp_path, "max_batch_lines = 9\n" + FAR))

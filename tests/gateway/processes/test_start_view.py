"""A start shows its stages, and sees from outside what an engine does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from engine.text.hub_weights import Transfer
from gateway.processes.credentials_file import Credentials
from gateway.processes.start_view import (
    DrawnStage,
    EngineStages,
    ReadyCard,
    StartView,
    about_model,
    download_of,
)
from gateway.settings.load import load
from gateway.settings.models import ModelConfig, ReplicaConfig

KNOWN = Credentials(base_url="http://127.0.0.1:8000/v1", api_key="sk-api", admin_key="sk-admin")
FAR = ModelConfig(name="far", replicas=(ReplicaConfig(upstream="http://x/v1", upstream_model="m"),))


def test_in_a_log_each_stage_has_a_line_at_its_begin_and_end() -> None:
    said: list[str] = []
    view = StartView(said.append)
    with view.stage("databases"):
        view.say("between")
    view.begin("model penny")
    for done in (0, 10, 20):
        view.step("model penny", "reads its weights", done, 2_000_000)
    view.step("model penny", "warms up")
    view.step("nobody", "warms up")
    view.end("model penny")
    view.end("model penny")
    assert [line.partition(", after")[0] for line in said] == [
        "Starting: databases",
        "between",
        "Ready: databases",
        "Starting: model penny",
        "Starting: model penny reads its weights, 2 MB",
        "Starting: model penny warms up",
        "Ready: model penny",
    ]


def test_a_stage_that_fails_is_not_called_ready() -> None:
    said: list[str] = []
    view = StartView(said.append)
    with pytest.raises(OSError, match="no"), view.stage("databases"):
        raise OSError("no")
    view.close()
    assert said == ["Starting: databases"]


def test_a_download_has_a_line_at_its_begin_at_its_end_and_sometimes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    view = StartView(said.append)
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for now in (0.0, 5.0, 11.0, 12.0):
        view.download("acme/m", Transfer(int(now * 10**6), 90 * 10**6, 1e6))
    view.end(download_of("acme/m"))
    assert said == [
        "Starting: download of acme/m, 90 MB",
        "Starting: download of acme/m, 11 of 90 MB, 1.0 MB/s, 1 min 19 s left",
        "Ready: download of acme/m, after 12.0 s",
    ]


def engine(proc: Path, pid: int, read: int, *files: Path, socket: str = "") -> None:
    """Write what /proc says of a process."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True, exist_ok=True)
    (folder / "net").mkdir(exist_ok=True)
    (folder / "net" / "unix").write_text(f"Num RefCount Protocol Flags\n{socket}")
    (folder / "io").write_text(f"rchar: {read}\nwchar: 1\n")
    for each in (folder / "fd").iterdir():
        each.unlink()
    for number, file in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(file)


def test_an_engine_is_followed_from_outside(tmp_path: Path) -> None:
    proc, model = tmp_path / "proc", tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(1000))
    stages = EngineStages(model, "unix:/h/engine-0.sock", proc)
    assert stages.look(7) == ("starts", 0, 0), "it is gone"
    engine(proc, 7, 500, tmp_path / "torch.so")
    assert stages.look(7) == ("starts", 0, 0)
    engine(proc, 7, 600, weights)
    assert stages.look(7) == ("reads its weights", 0, 1000)
    engine(proc, 7, 1000, weights)
    assert stages.look(7) == ("reads its weights", 400, 1000)
    engine(proc, 7, 9000, weights)
    assert stages.look(7) == ("reads its weights", 1000, 1000)
    engine(proc, 7, 9000)
    assert stages.look(7) == ("warms up", 0, 0)
    engine(proc, 7, 9000, socket="0: 00000002 00000000 00010000 0001 01 9 /h/engine-0.sock\n")
    assert stages.look(7) == ("serves", 0, 0)
    engine(proc, 7, 9000, socket="0: 00000003 00000000 00000000 0001 03 9 /h/engine-0.sock\n")
    assert stages.look(7) == ("warms up", 0, 0), "a connection of an earlier one"
    engine(proc, 8, 10)
    assert stages.look(8) == ("starts", 0, 0), "another process begins anew"


def card(**changes: object) -> str:
    fields = {
        "base_url": "http://127.0.0.1:8000/v1",
        "model": load({}, {}).models[0],
        "known": KNOWN,
        "credentials": Path("/h/credentials.json"),
        "shows_key": False,
        "console": "http://127.0.0.1:8000/console",
    }
    return ReadyCard(**fields | changes).text()  # type: ignore[arg-type]


def test_the_card_has_the_key_on_a_terminal_alone() -> None:
    assert "sk-" not in card()
    assert "Bearer sk-api" in card(shows_key=True) and "sk-admin" not in card(shows_key=True)


def test_the_card_leads_to_the_console() -> None:
    assert "Console   http://127.0.0.1:8000/console (`tollgate users link`" in card()
    link = "http://127.0.0.1:8000/oauth/link?token=t"
    assert f"Console   {link} (signs the owner in, once" in card(sign_in=link)
    first = card(sign_in=link, has_owner=False)
    assert f"Console   {link} (who opens it becomes the first owner, once" in first


def test_a_card_without_keys_says_how_to_make_one() -> None:
    text = card(known=None)
    assert "There is no /h/credentials.json" in text and "tollgate keys create" in text
    assert "curl" not in text


def test_what_a_model_is_comes_from_its_folder(tmp_path: Path) -> None:
    assert about_model(FAR) == "of an upstream"
    model = ModelConfig(name="m", path=tmp_path)
    assert about_model(model) == str(tmp_path)
    (tmp_path / "about.md").write_text("two\nlines " + "x" * 1000)
    assert about_model(model).startswith("two lines xxx") and len(about_model(model)) <= 300
    (tmp_path / "about.md").write_text("\x1b[2J")
    assert about_model(model) == str(tmp_path)


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("TERM", "dumb")
    said: list[str] = []
    view = StartView(said.append, on_terminal=True)
    with view.stage("databases"):
        pass
    assert [line.partition(", after")[0] for line in said] == [
        "Starting: databases",
        "Ready: databases",
    ]


@pytest.mark.parametrize("width", [60, 100])
def test_what_is_drawn_fits_the_terminal(width: int) -> None:
    stage = DrawnStage(name="model penny", began=0.0)
    drawn = [stage.text(1.0, 11, width, ascii_only=False).plain]
    stage.step, stage.done, stage.total = "reads its weights", 400_000_000, 990_000_000
    drawn.append(stage.text(61.5, 11, width, ascii_only=False).plain)
    assert ("400 of 990 MB" if width == 100 else "40%") in drawn[-1]
    stage.is_cut_short = True
    drawn.append(stage.text(61.5, 11, width, ascii_only=False).plain)
    assert drawn[-1].startswith("✗ model penny  reads its weights")
    stage.ended = 62.25
    drawn.append(stage.text(99.0, 11, width, ascii_only=True).plain)
    assert drawn[-1] == "+ model penny  62.2 s"
    assert all(cell_len(line) <= width for line in drawn)


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_card_on_a_terminal_breaks_no_command_and_no_call(width: int) -> None:
    card = ReadyCard(
        base_url=KNOWN.base_url,
        model=load({}, {}).models[0],
        known=KNOWN,
        credentials=Path("/h/credentials.json"),
        shows_key=True,
        console="http://127.0.0.1:8000/console",
    )
    lines = card.styled(width).plain.splitlines()
    call = [line for line in lines if line.startswith(("curl", "  -"))]
    assert "\n".join(call) in card.text()
    whole = ("`tollgate up --model Qwen/Qwen2.5-0.5B-Instruct`", "`tollgate keys create --name me`")
    for each in whole:
        assert any(each in line for line in lines)
    rest = [line for line in lines if line not in call and not any(map(line.__contains__, whole))]
    assert max(map(len, rest)) <= width
    assert "".join("".join(lines).split()) == "".join(card.text().split())

"""Checks what a worker before upstreams alone does not load: libraries that some other gateway,
page or command needs, and that would stay in the memory of each worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import runpy
import sys
from contextlib import suppress
from pathlib import Path

home, config = sys.argv[1:]
sys.argv[1:] = ["worker"]
with suppress(SystemExit):  # it is told of no socket
    runpy.run_module("gateway", run_name="__main__")

from gateway.app.create import create_app
from gateway.settings.load import load

create_app(load({"home": home, "config": Path(config)}, {}))
rarely = {"alembic", "arro3", "gateway.cli", "jinja2", "pydantic", "rich", "tokenizers", "webauthn"}
rarely |= {"click", "iso4217", "opentelemetry.sdk", "sqlalchemy.orm"}
rarely |= {"uvicorn.main", "xml.etree.ElementTree"}
rarely |= {"gateway.console.changes", "gateway.routes.admin.keys", "gateway.routes.console.keys"}
rarely |= {"gateway.routes.oauth.endpoints", "gateway.routes.organization.users"}
of_the_bridge = {"cel_expr_python", "confusable_homoglyphs", "jsonschema_rs"}
print(*sorted((rarely | of_the_bridge) & sys.modules.keys()))
"""


def test_a_worker_loads_nothing_that_it_may_never_need(tmp_path: Path) -> None:
    config = tmp_path / "tollgate.toml"
    config.write_text('[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n')
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_settings_that_are_not_there_are_one_line() -> None:
    asked = ("--id=x", "--listen-fd=0", "--report-fd=0", "--settings=no.json")
    command = [sys.executable, "-m", "gateway", "worker", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tollgate: --settings: FileNotFoundError: ")
    assert done.stderr.count("\n") == 1

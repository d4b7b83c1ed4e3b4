"""Checks what a worker before upstreams alone does not load: libraries that some other gateway,
page or command needs, and that would stay in the memory of each worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from gateway.settings.load import load
from gateway.app.worker import create_app

create_app(load({"home": sys.argv[1], "config": Path(sys.argv[2])}, {}))
rarely = {"alembic", "arro3", "jinja2", "pydantic", "tokenizers", "webauthn"}
print(*sorted(rarely & sys.modules.keys()))
"""


def test_a_worker_loads_nothing_that_it_may_never_need(tmp_path: Path) -> None:
    config = tmp_path / "tollgate.toml"
    config.write_text('[[model]]\nname = "far"\nupstream = "http://127.0.0.1:1/v1"\n')
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""

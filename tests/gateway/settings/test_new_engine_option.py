"""An engine option is added by one field of `engine.options`, and what `make fields` writes of it.

Its use in the engine is the only other edit.
"""

from __future__ import annotations

from pathlib import Path

from tests.copied_product import copy_product, run_copy
from tests.option_table import PAGE, option_table

FIELD = """\
    step_patience: Annotated[PositiveInt, _steps("steps that a prompt waits for others")] = 3
"""
AFTER = "    seed: Annotated[int, _model("
ASK = """
import sys
from pathlib import Path
from engine import __main__ as engine_main
from gateway.home import Home
from gateway.processes.engine_set import engine_command
from gateway.settings.load import load
from gateway.settings.file import SettingsError
from tests.option_table import option_table

Path("tollgate.toml").write_text("[engine]\\nstep_patience = 5\\n")
settings = load({}, {})
record = Home(settings.home).usage_record("m")
[model] = settings.models
command = engine_command(model, *model.engines, model.engine_options, record, settings)
print(" ".join(command[command.index("--step-patience"):][:2]))
print(engine_main._config(engine_main._parser().parse_args(command[3:])).step_patience)
MODEL = "[[model]]\\nname = 'm'\\npath = 'm'\\n[model.engine_options]\\n"
Path("tollgate.toml").write_text(MODEL + "step_patience = 0\\n")
try:
    load({}, {})
except SettingsError as error:
    print(error)
print(*(row for row in option_table().splitlines() if "step_patience" in row))
assert "torch" not in sys.modules
"""


def test_the_documentation_has_every_option() -> None:
    assert option_table() in PAGE.read_text()


def test_a_new_engine_option_is_one_field(tmp_path: Path) -> None:
    assert copy_product(tmp_path, lines={"engine/options.py": {AFTER: FIELD}}) == 1
    told = run_copy(tmp_path, ("-c", ASK))
    assert told.stdout.splitlines() == [
        "--step-patience 5",
        "5",
        "tollgate.toml: model[0].engine_options.step_patience: expected `int` >= 1",
        "| `step_patience` | positive int | `3` | steps that a prompt waits for others |",
    ], told.stderr
    shown = " ".join(run_copy(tmp_path, ("-m", "engine", "--help")).stdout.split())
    assert "--step-patience STEP_PATIENCE steps that a prompt waits for others" in shown
    arguments = ("--model", "m", "--listen", "unix:/s", "--step-patience", "0")
    refused = run_copy(tmp_path, ("-m", "engine", *arguments))
    assert refused.returncode == 2
    assert "argument --step-patience: 0 is not positive" in refused.stderr

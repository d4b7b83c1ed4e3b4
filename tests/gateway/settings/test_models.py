"""The settings of models say the options of their engines, and adapters over them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import __main__ as engine_main
from gateway.settings.engine_options import KV_CACHE_FRACTION, EngineOptions
from gateway.settings.file import SettingsError
from gateway.settings.load import load, restore, save
from gateway.settings.models import PACKAGE_ROOT


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(content: str) -> None:
    Path("tollgate.toml").write_text(content)


def test_every_engine_option_is_a_flag_of_the_engine() -> None:
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "prefix_caching": False}
    values |= {"kv_cache_fraction": 0.25, "load_format": "dummy"}
    values |= {"quantization": "int8", "speculative": "ngram"}
    values |= {"draft_model": Path("d")}
    values |= {"agentic_max_share": 0.5, "batch_max_share": 0.25}
    values |= {"agentic_kv_headroom": 0.0, "batch_kv_headroom": 0.125}
    values |= {"cache_lease_share": 0.5}
    values |= {"kv_cache_dtype": "fp8", "deterministic": True, "poison_freed_blocks": True}
    options = EngineOptions(
        **{name: values.get(name, 7) for name in EngineOptions.__struct_fields__}
    )
    flags = ["--model", "m", "--listen", "unix:/s", *options.to_flags()]
    parsed: argparse.Namespace = engine_main._parser().parse_args(flags)
    fields = {"prefix_caching": "enable_prefix_caching"}
    found = {
        name: getattr(parsed, fields.get(name, name)) for name in EngineOptions.__struct_fields__
    }
    assert found == msgspec.structs.asdict(options)
    assert EngineOptions().to_flags() == []
    assert EngineOptions(prefix_caching=True, deterministic=False).to_flags() == []


def test_every_flag_of_the_engine_is_an_engine_option() -> None:
    parsed = vars(engine_main._parser().parse_args(["--model", "m", "--listen", "unix:/s"]))
    ours = {"model", "revision", "adapters", "served_name", "listen"}
    process = {"drain_timeout_s", "log_level", "usage_record"}
    flags = {name.removeprefix("enable_") for name in parsed} - ours - process
    assert flags == set(EngineOptions.__struct_fields__)


SEVERAL = """
[engine]
dtype = "bfloat16"
seed = 7
prefix_caching = false
[[model]]
name = "one"
path = "one"
[[model]]
name = "two"
path = "two"
[model.engine_options]
dtype = "float32"
prefix_caching = true
speculative = "ngram"
num_draft_tokens = 2
[[model]]
name = "three"
path = "three"
[model.engine_options]
kv_cache_fraction = 0.1
[[model]]
name = "four"
path = "four"
engine = "tcp:h:1"
"""


def test_a_models_own_engine_options_stand_over_those_of_all() -> None:
    write(SEVERAL)
    one, two, three, four = (model.engine_options for model in load({}, {}).models)
    both = KV_CACHE_FRACTION / 2
    assert one == EngineOptions(
        dtype="bfloat16", seed=7, prefix_caching=False, kv_cache_fraction=both
    )
    assert two == EngineOptions(
        dtype="float32",
        seed=7,
        prefix_caching=True,
        speculative="ngram",
        num_draft_tokens=2,
        kv_cache_fraction=both,
    )
    assert "--no-prefix-caching" not in two.to_flags()
    assert three == msgspec.structs.replace(one, kv_cache_fraction=0.1), "its own, not shared"
    assert four == EngineOptions()


@pytest.mark.parametrize("size", ["kv_cache_bytes", "num_blocks"])
def test_who_names_one_size_of_the_kv_cache_has_named_the_size(size: str) -> None:
    """num_blocks of [engine] would win over a model's own fraction in the engine."""
    everybodys = EngineOptions(**{size: 4096, "seed": 1})
    own = EngineOptions(kv_cache_fraction=0.1)
    assert own.over(everybodys) == EngineOptions(kv_cache_fraction=0.1, seed=1)
    assert EngineOptions(seed=2).over(everybodys) == msgspec.structs.replace(everybodys, seed=2)


def test_how_a_model_writes_may_be_named() -> None:
    template = Path("t.jinja")
    template.write_text("{{ messages }}")
    write(
        '[[model]]\nname = "m"\npath = "m"\nchat_template = "t.jinja"\n'
        'tool_call_parser = "llama3_json"\nreasoning_parser = "none"\n'
        '[[model]]\nname = "n"\npath = "n"\n'
    )
    save(load({}, {}), Path("saved.json"))
    m, n = restore(Path("saved.json")).models
    assert m.chat_template == template.absolute()
    assert (m.tool_call_parser, m.reasoning_parser) == ("llama3_json", "none")
    assert (n.chat_template, n.tool_call_parser, n.reasoning_parser) == (None, None, None)


WITH_DRAFTS = """
[engine]
speculative = "draft"
draft_model = "small"
[[model]]
name = "one"
path = "one"
[[model]]
name = "two"
path = "two"
[model.engine_options]
speculative = "off"
[[model]]
name = "three"
path = "three"
[model.engine_options]
draft_model = "models/penny"
"""


def test_a_draft_model_is_found_as_models_are(tmp_path: Path) -> None:
    """In the working folder, or else where Tollgate's own stand; who guesses otherwise has none."""
    write(WITH_DRAFTS)
    settings = load({}, {})
    one, two, three = (model.engine_options for model in settings.models)
    assert (one.speculative, one.draft_model) == ("draft", tmp_path / "small")
    assert (two.speculative, two.draft_model) == ("off", None)
    assert three.draft_model == PACKAGE_ROOT / "models" / "penny"
    assert f"--draft-model {tmp_path / 'small'}" in " ".join(one.to_flags())
    save(settings, tmp_path / "settings")
    assert restore(tmp_path / "settings").models == settings.models


WITH_ADAPTERS = """
[[model]]
name = "penny"
path = "models/penny"
  [[model.adapter]]
  name = "penny-legal"
  path = "adapters/legal"
  [[model.adapter]]
  name = "penny-terse"
  path = "/adapters/terse"
[[model]]
name = "far"
path = "models/penny"
engine = "tcp:h:1"
  [[model.adapter]]
  name = "far-legal"
"""


def test_adapters_are_models_by_name(tmp_path: Path) -> None:
    write(WITH_ADAPTERS)
    found = load({}, {})
    penny, far = found.models
    assert [(each.name, each.path) for each in penny.adapters] == [
        ("penny-legal", tmp_path / "adapters" / "legal"),
        ("penny-terse", Path("/adapters/terse")),
    ]
    assert [(each.name, each.path) for each in far.adapters] == [("far-legal", None)]
    assert found.model_names == ("penny", "penny-legal", "penny-terse", "far", "far-legal")
    assert found.bases == {"penny-legal": "penny", "penny-terse": "penny", "far-legal": "far"}
    save(found, tmp_path / "settings.json")
    assert restore(tmp_path / "settings.json") == found


def test_engines_that_start_together_share_the_free_memory() -> None:
    assert EngineOptions().shared_by(1).kv_cache_fraction == KV_CACHE_FRACTION
    assert EngineOptions().shared_by(4).kv_cache_fraction == KV_CACHE_FRACTION / 4
    assert EngineOptions(kv_cache_fraction=0.9).shared_by(3).kv_cache_fraction == 0.9 / 3
    for asked in (EngineOptions(kv_cache_bytes=1 << 30), EngineOptions(num_blocks=64)):
        assert asked.shared_by(4) == asked


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1])
def test_a_fraction_of_memory_is_above_0_and_at_most_1(
    fraction: float, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f"[engine]\nkv_cache_fraction = {fraction}\n")
    with pytest.raises(SettingsError, match="kv_cache_fraction"):
        load({}, {})
    with pytest.raises(SystemExit):
        engine_main._parser().parse_args(
            ["--model", "m", "--listen", "unix:/s", f"--kv-cache-fraction={fraction}"]
        )
    assert "--kv-cache-fraction" in capsys.readouterr().err

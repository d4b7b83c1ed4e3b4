"""The settings of models say the options of their engines, and adapters over them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import __main__ as engine_main
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.options import EngineOptions, Option, engine_options
from gateway.home import engine_number
from gateway.settings.changes import changes_between
from gateway.settings.file import SettingsError
from gateway.settings.load import SavedSettings, load, restore, save
from gateway.settings.models import FIRST_JOINED, PACKAGE_ROOT, options_beside, override

ONE = "[[model]]\nname = 'one'\npath = 'one'\n"
TWO = "[[model]]\nname = 'two'\npath = 'two'\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(content: str) -> None:
    Path("tollgate.toml").write_text(content)


def another_value(option: Option) -> Any:
    """Return a value of an option that is not its default."""
    if option.choices:
        return next(each for each in option.choices if each != option.default)
    if option.kind is Path:
        return Path("d")
    if option.kind is bool:
        return not option.default
    return next(n for n in (option.kind(7), option.kind(0.5)) if option.allows(n))


def parse(*flags: str) -> EngineConfig:
    arguments = engine_main._parser().parse_args(["--model", "m", "--listen", "unix:/s", *flags])
    return engine_main._config(arguments)


def test_every_engine_option_reaches_the_engine_by_its_flag() -> None:
    asked = {option.name: another_value(option) for option in engine_options()}
    config = parse(*EngineOptions(**asked).to_flags())
    assert {name: getattr(config, name) for name in asked} == asked
    assert EngineOptions().to_flags() == []
    assert parse() == EngineConfig(model=Path("m"))


def test_every_engine_option_is_refused_out_of_its_bound_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bounded = [option for option in engine_options() if option.bound_in_words]
    assert len(bounded) > 15
    for option in bounded:
        wrong = option.kind(-1)
        write(f"[engine]\n{option.name} = {wrong}\n")
        with pytest.raises(SettingsError, match=f"tollgate.toml: engine.{option.name}: expected `"):
            load({}, {})
        with pytest.raises(SystemExit):
            parse(f"{option.flag}={wrong}")
        told = f"argument {option.flag}: {wrong} is not {option.bound_in_words}"
        assert told in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"{option.name} is {wrong}; it must be "):
            EngineConfig(model=Path("m"), **{option.name: wrong})


def test_what_is_no_number_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, text, told in [
        ("--seed", "x", "argument --seed: invalid int value: 'x'"),
        ("--itl-target-s", "nan", "argument --itl-target-s: nan is not at least 0 and at most"),
        ("--dtype", "int4", "argument --dtype: invalid choice: 'int4'"),
    ]:
        with pytest.raises(SystemExit):
            parse(flag, text)
        assert told in capsys.readouterr().err


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
engine = "tcp:[::1]:1"
"""


def test_a_models_own_engine_options_stand_over_those_of_all() -> None:
    write(SEVERAL)
    one, two, three, four = (model.engine_options for model in load({}, {}).models)
    assert one == EngineOptions(dtype="bfloat16", seed=7, prefix_caching=False)
    assert two == EngineOptions(
        dtype="float32",
        seed=7,
        prefix_caching=True,
        speculative="ngram",
        num_draft_tokens=2,
    )
    assert "--no-prefix-caching" not in two.to_flags()
    assert three == msgspec.structs.replace(one, kv_cache_fraction=0.1)
    assert four == EngineOptions()


@pytest.mark.parametrize("size", ["kv_cache_bytes", "num_blocks"])
def test_who_names_one_size_of_the_kv_cache_has_named_the_size(size: str) -> None:
    """num_blocks of [engine] would win over a model's own fraction in the engine."""
    everybodys = {size: 4096, "seed": 1}
    own = {"kv_cache_fraction": 0.1}
    assert override(everybodys, own) == {"kv_cache_fraction": 0.1, "seed": 1}
    assert override(everybodys, {"seed": 2}) == everybodys | {"seed": 2}


def test_how_a_model_writes_may_be_named() -> None:
    template = Path("t.jinja")
    template.write_text("{{ messages }}")
    write(
        '[[model]]\nname = "m"\npath = "m"\nchat_template = "t.jinja"\n'
        'tool_call_parser = "llama3_json"\nreasoning_parser = "none"\ndialect = "vllm"\n'
        '[[model]]\nname = "n"\npath = "n"\n'
    )
    save(SavedSettings(number=1, settings=load({}, {})), Path("saved.json"))
    m, n = restore(Path("saved.json")).settings.models
    assert m.chat_template == template.absolute()
    assert (m.tool_call_parser, m.reasoning_parser) == ("llama3_json", "none")
    assert (m.dialect, n.dialect) == ("vllm", None)
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
    save(SavedSettings(number=1, settings=settings), tmp_path / "settings")
    assert restore(tmp_path / "settings").settings.models == settings.models


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
engine = "tcp:[::1]:1"
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
    save(SavedSettings(number=1, settings=found), tmp_path / "settings.json")
    assert restore(tmp_path / "settings.json").settings == found


def shares(text: str) -> dict[str, tuple[float, int | None]]:
    """Return the fraction of memory and the threads that an engine of each model is started
    with."""
    write(text)
    models = load({}, {}).models
    found = {each.name: options_beside(each, models, num_cores=8) for each in models}
    return {name: (it.kv_cache_fraction, it.num_threads) for name, it in found.items()}


def test_engines_that_start_together_share_the_free_memory() -> None:
    alone = EngineOptions().kv_cache_fraction
    assert shares(ONE) == {"one": (alone, None)}
    assert shares(ONE + TWO) == {"one": (alone / 2, None), "two": (alone / 2, None)}
    assert shares("[engine]\nkv_cache_fraction = 0.9\n" + ONE)["one"] == (0.9, None)
    far = "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\n"
    assert shares(ONE + far)["one"] == (alone, None)


def test_replicas_share_memory_and_processors() -> None:
    alone = EngineOptions().kv_cache_fraction
    twice = ONE + "replicas = 2\n"
    assert shares(twice + TWO) == {"one": (alone / 3, 4), "two": (alone / 3, None)}
    assert shares(ONE + "replicas = 9\n")["one"] == (alone / 9, 1)
    own = twice + "[model.engine_options]\nkv_cache_fraction = 0.5\nnum_threads = 3\n"
    assert shares(own + TWO) == {"one": (0.25, 3), "two": (alone, None)}
    for size in ("kv_cache_bytes = 1073741824", "num_blocks = 64"):
        sized = twice + f"[model.engine_options]\n{size}\n"
        assert shares(sized)["one"] == (alone, 4), "each has that size"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ONE + "replicas = 0", "0 only where engines may join, by `joined`"),
        (ONE + "replicas = -2", "expected `int` >= 0"),
        (ONE + "replicas = 65", "expected `int` <= 64"),
        (ONE + "replicas = 'two'", "expected a number such as 2, or a range such as '1..4'"),
        (ONE + "replicas = '1..2'\njoined = 1", "a range only without `joined`"),
        (ONE + "engine = 'tcp:[::1]:1'\nreplicas = 2", "only for an engine that is started here"),
        (
            "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\nreplicas = 2",
            "only for a model with a path",
        ),
    ],
)
def test_a_wrong_number_of_replicas_is_named(text: str, complaint: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=re.escape(f"model[0].replicas: {complaint}")):
        load({}, {})


ROLES = "prefill = 1\ndecode = 2\n"
BOTH_JOIN = "joined = { prefill = 1, decode = 2 }\n"
JOIN = "[fleet]\njoin_listen = 'tcp:0.0.0.0:9400'\n"
POOL = "[model.kubernetes]\nstateful_set = 'one'\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (ONE + "prefill = 1", "prefill: nobody goes on with what it computes: wants decode beside"),
        (ONE + "decode = 1", "decode: nobody computes prompts for it: wants prefill beside it"),
        (
            JOIN + ONE + "decode = 1\njoined = { decode = 1 }",
            "decode: nobody computes prompts for it: wants prefill beside it, or joined.prefill",
        ),
        (
            JOIN + ONE + "joined = { prefill = 2 }",
            "joined.prefill: nobody goes on with what it computes",
        ),
        (JOIN + ONE + "joined = { decode = 2 }", "joined.decode: nobody computes prompts for it"),
        (JOIN + ONE + "joined = {}", "joined: wants prefill or decode: how many of either may"),
        (JOIN + ONE + "joined = { both = 2 }", "joined.both: unknown key"),
        (JOIN + ONE + "joined = { prefill = 0 }", "joined.prefill: expected `int` >= 1"),
        (ONE + BOTH_JOIN, "joined: wants fleet.join_listen"),
        (JOIN + ONE + BOTH_JOIN + "replicas = 0", "replicas: not beside roles"),
        (JOIN + ONE + BOTH_JOIN + "[model.ray]\nengines = 2", "ray.engines: not beside roles"),
        (JOIN + ONE + BOTH_JOIN + POOL, "kubernetes: only beside a range"),
        (ONE + "prefill = 0\ndecode = 1", "prefill: expected `int` >= 1"),
        (ONE + "prefill = 1\ndecode = 0", "decode: expected `int` >= 1"),
        (ONE + ROLES + "replicas = 3", "replicas: not beside roles"),
        (ONE + ROLES + "joined = 1", "joined: beside prefill and decode it says how many of"),
        (ONE + "engine = 'unix:/s'\n" + ROLES, "prefill: only for an engine that is started here"),
        (ONE + ROLES + "[fleet]\nfetch = false", "prefill: wants fleet.fetch"),
        (
            ONE + ROLES + "[model.engine_options]\nprefix_caching = false",
            "prefill: wants engine_options.prefix_caching",
        ),
    ],
)
def test_roles_that_cannot_be_are_named(text: str, complaint: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=re.escape(f"model[0].{complaint}")):
        load({}, {})


def test_the_first_engines_compute_prompts_for_the_others() -> None:
    write(ONE + ROLES)
    [one] = load({}, {}).models
    assert [*map(one.role_of, one.engines)] == ["prefill", "decode", "decode"]
    assert one.started == one.engines
    write(ONE + "replicas = 3\n")
    [one] = load({}, {}).models
    assert {*map(one.role_of, one.engines)} == {"both"}


def test_engines_that_join_have_places_by_role() -> None:
    write(JOIN + ONE + BOTH_JOIN)
    settings = load({}, {})
    [one] = settings.models
    assert one.started == ()
    assert [*map(one.role_of, one.joined)] == ["prefill", "decode", "decode"]
    save(SavedSettings(number=1, settings=settings), Path("saved.json"))
    assert restore(Path("saved.json")).settings.models == (one,)
    write(JOIN + ONE + "decode = 2\njoined = { prefill = 1, decode = 1 }\n")
    mixed = load({}, {})
    [one] = mixed.models
    assert [*map(one.role_of, one.started)] == ["decode", "decode"]
    assert [*map(one.role_of, one.joined)] == ["prefill", "decode"]
    shown = [str(each) for each in changes_between(settings, mixed)]
    assert shown == ["~ models.one.joined.decode: 2 -> 1", "+ models.one.decode = 2"]


FAR = "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\n"
BOX = ONE + "engine = 'tcp:box:1'\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (BOX, "engine: tcp:box:1 is on another machine"),
        (BOX + "insecure = false", "engine: tcp:box:1 is on another machine"),
        (ONE + "insecure = true", "insecure: only beside an engine's tcp: address"),
        (ONE + "engine = 'unix:/s'\ninsecure = true", "insecure: only beside an engine's tcp:"),
        (ONE + "joined = 0", "joined: expected `int` >= 1"),
        (ONE + "joined = 2", "joined: wants fleet.join_listen, where they come"),
        (JOIN + BOX + "insecure = true\njoined = 2", "joined: only for an engine that is started"),
        (
            JOIN + "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\njoined = 2",
            "joined: only for",
        ),
    ],
)
def test_an_engine_of_another_machine_that_cannot_be_is_named(text: str, complaint: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=re.escape(f"model[0].{complaint}")):
        load({}, {})


PODS = JOIN + ONE + "replicas = 0\njoined = '1..4'\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PODS, "joined: a range only beside [model.kubernetes]"),
        (JOIN + ONE + "joined = '1..4'\n" + POOL, "replicas: wants 0 beside a range of engines"),
        (PODS.replace("1..4", "0..4") + POOL, "joined: '0..4': the least number is 1"),
        (PODS.replace("1..4", "4..1") + POOL, "joined: '4..1' has its least number behind"),
        (PODS.replace("1..4", "all") + POOL, "joined: expected a number such as 2, or a range"),
        (PODS.replace("'1..4'", "4") + POOL, "kubernetes: only beside a range"),
        (ONE + POOL, "kubernetes: only beside a range"),
        (PODS + "[model.kubernetes]", "kubernetes.stateful_set: missing"),
        (PODS + POOL + "namespace = 'a/b'", "kubernetes.namespace: expected a-z, 0-9 and hyphens"),
        (PODS + POOL.replace("'one'", "'../x'"), "kubernetes.stateful_set: expected a-z, 0-9"),
        (PODS + POOL.replace("one", 53 * "a"), "kubernetes.stateful_set: expected `str` of length"),
        (PODS + POOL + "pods = 1", "kubernetes.pods: unknown key"),
        (PODS + POOL + "[model.ray]\ngpus = 1", "ray: not beside [model.kubernetes]"),
        (
            "[[model]]\nname = 'far'\nupstream = 'http://h/v1'\n" + POOL,
            "kubernetes: only for a model",
        ),
        (
            ONE + "engine = 'unix:/s'\n" + POOL,
            "kubernetes: only for an engine that is started here",
        ),
        (PODS.removeprefix(JOIN) + POOL, "joined: wants fleet.join_listen"),
    ],
)
def test_a_pool_of_kubernetes_that_cannot_be_is_named(text: str, complaint: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=re.escape(f"model[0].{complaint}")):
        load({}, {})


def test_two_models_do_not_scale_one_pool() -> None:
    write(PODS + POOL + TWO + PODS.removeprefix(JOIN + ONE) + POOL)
    with pytest.raises(
        SettingsError, match=r"model\[1\].kubernetes.stateful_set: 'one' is that of"
    ):
        load({}, {})


def test_a_pool_of_kubernetes_has_places_for_its_most_and_is_shown_as_written() -> None:
    write(PODS + POOL)
    settings = load({}, {})
    [one] = settings.models
    assert one.kubernetes is not None and one.kubernetes.namespace is None
    assert (len(one.joined), one.started, str(one.planned_range)) == (4, (), "1..4")
    save(SavedSettings(number=1, settings=settings), Path("saved.json"))
    assert restore(Path("saved.json")).settings.models == (one,)
    write(PODS.replace("1..4", "2..5") + POOL)
    shown = [str(each) for each in changes_between(settings, load({}, {}))]
    assert shown == ['~ models.one.joined: "1..4" -> "2..5"']


def test_an_engine_of_another_machine_may_be_reached_in_the_clear() -> None:
    write(BOX + "insecure = true")
    [one] = load({}, {}).models
    assert one.engines == ("tcp:box:1",)


def test_places_of_engines_that_join_are_behind_those_that_are_started() -> None:
    write(JOIN + ONE + "joined = 2\n" + TWO + "replicas = 0\njoined = 1\n")
    one, two = load({}, {}).models
    assert [list(map(engine_number, each.engines)) for each in (one, two)] == [
        [0, FIRST_JOINED, FIRST_JOINED + 1],
        [FIRST_JOINED + 2],
    ]
    assert (len(one.started), one.joined) == (1, one.engines[1:])
    assert (two.started, two.joined) == ((), two.engines)
    assert shares(JOIN + ONE + "joined = 2\n")["one"] == shares(ONE)["one"]


def test_engines_of_a_model_have_numbers_of_their_own() -> None:
    write(ONE + "replicas = 3\n" + TWO + "replicas = 2\n")
    one, two = load({}, {}).models
    assert [list(map(engine_number, each.engines)) for each in (one, two)] == [[0, 2, 3], [1, 4]]
    assert [two.replica_name(each) for each in two.engines] == ["two/1", "two/4"]
    assert two.replica_name(two.engines[1], "law") == "law/4"
    write(ONE)
    [one] = load({}, {}).models
    assert one.replica_name(*one.engines) == "one"


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


def test_a_range_of_replicas_begins_with_one_at_least_and_shares_as_all() -> None:
    write(ONE + "replicas = '0..3'\n" + TWO + "replicas = '2..4'\n")
    one, two = load({}, {}).models
    assert (len(one.engines), one.most_engines, len(two.engines)) == (1, 3, 2)
    assert one.replica_name(one.engines[0]) == "one/0"
    assert options_beside(two, (two,), num_cores=8).num_threads == 2
    asleep = one.sized(0)
    assert asleep.is_asleep and len(asleep.engines) == 1
    assert len(asleep.sized(9).engines) == 3 and not asleep.sized(1).is_asleep
    assert len(two.sized(0).engines) == 2


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("4..2", "'4..2' has its least number behind its largest"),
        ("0..0", "'0..0': the largest number is from 1 to 64"),
        ("1..65", "'1..65': the largest number is from 1 to 64"),
        ("1-4", "expected a number such as 2, or a range such as '1..4'"),
        ("-1..4", "expected a number such as 2, or a range such as '1..4'"),
    ],
)
def test_a_wrong_range_of_replicas_is_named(written: str, complaint: str) -> None:
    write(ONE + f"replicas = '{written}'")
    with pytest.raises(SettingsError, match=re.escape(f"model[0].replicas: {complaint}")):
        load({}, {})

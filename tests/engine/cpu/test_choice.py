"""Tests that products are chosen by their times, once on a machine, and that both compute alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels.attention.cpu import CpuAttentionPlan, library_for
from engine.kernels.attention.types import AttentionShape
from engine.kernels.choice import products, table
from engine.kernels.choice.machine import Machine, this_machine
from engine.kernels.choice.microkernel import microkernel
from engine.kernels.choice.products import (
    BUDGET_S,
    CLASS_OF,
    LIBRARY,
    OWN,
    ROW_CLASSES,
    LinearShape,
    PromptShape,
    Run,
    Shape,
)
from engine.kernels.cpu import backend as cpu_backend
from engine.kernels.linear.dispatch import pack_linear
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest, SamplingParams
from tests.engine import checkpoints
from tests.engine.cpu.test_cpu_kernels import TOLERANCE, relaid
from tests.engine.kernels.attention_steps import Step, error, shape_of

CPU = torch.device("cpu")
BF16 = torch.bfloat16
needs_library = pytest.mark.skipif(
    not cpu_backend.uses_cpu_kernels(CPU) or microkernel() is None,
    reason="torch has no microkernel for this processor",
)
needs_numba = pytest.mark.skipif(
    not cpu_backend.uses_cpu_kernels(CPU), reason="numba or libgomp is not here"
)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_uses", {})
    monkeypatch.setattr(products, "_choices", {})
    monkeypatch.setattr(products, "FEWEST_WEIGHTS", 0)


@needs_library
@pytest.mark.parametrize("rows", [1, 3, 15, 16, 33, 96, 97, 230])
@pytest.mark.parametrize("size", [(32, 64), (70, 96), (5, 34)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_library_multiplies_as_our_tiles_do(
    rows: int, size: tuple[int, int], threads: int
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(rows)
    weight, bias = torch.randn(size).to(BF16), torch.randn(size[0]).to(BF16)
    x = torch.randn(rows, size[1] + 6).to(BF16)[:, : size[1]]
    exact = x.double() @ weight.double().t()
    for given, expected in ((None, exact), (bias, exact + bias.double())):
        product = pack_linear(weight, given)
        asked = products.uses_library(LinearShape(*size))
        assert asked is not None
        asked[0][:] = [True] * len(ROW_CLASSES)
        assert error(product(x), expected) < TOLERANCE[BF16]
        fixed = pack_linear(weight, given, deterministic=True)
        assert torch.equal(fixed(x)[-1:], fixed(x[-1:])), "one product for any number of rows"


@needs_library
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("heads, head_dim", [((9, 3), 64), ((4, 4), 32), ((26, 2), 96)])
def test_the_library_attends_as_our_tiles_do(
    window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    torch.set_num_threads(2)
    shape = shape_of(heads, head_dim, CPU, BF16)
    seqs = [(1, 301), (1, 17), (1, 1), (40, 120), (33, 33), (13, 13), (2, 34)]
    step = Step(seqs, shape, window, 3)
    plan = CpuAttentionPlan(step.metadata, shape, window, microkernel())
    assert error(plan.attend(step.q, relaid(step)), step.exact()) < TOLERANCE[BF16]


def test_every_number_of_rows_has_its_class() -> None:
    for rows, number in enumerate(CLASS_OF):
        assert rows <= ROW_CLASSES[number]
        assert number == 0 or rows > ROW_CLASSES[number - 1]
    names = [products.class_name(number) for number in range(len(ROW_CLASSES))]
    assert names[:2] == ["1 row", "2-4 rows"] and names[-1] == "129+ rows"


class FakeWays:
    """Ways that take what they are said to, on a clock that they move."""

    def __init__(self, seconds: Callable[[Shape, int, str], float]) -> None:
        self.seconds = seconds
        self.now_s = 0.0
        self.asked: list[tuple[Shape, int]] = []

    def clock(self) -> float:
        return self.now_s

    def __call__(self, shape: Shape, rows: int) -> Mapping[str, Run]:
        self.asked.append((shape, rows))

        def run(way: str) -> None:
            self.now_s += self.seconds(shape, rows, way)

        return {way: lambda way=way: run(way) for way in (OWN, LIBRARY)}  # type: ignore[misc]


def faster_from_8_rows(shape: Shape, rows: int, way: str) -> float:
    return 1e-4 * (0.5 if way == LIBRARY and rows >= 8 else 1.0)


SHAPES: tuple[Shape, ...] = (LinearShape(64, 32), LinearShape(32, 64), PromptShape(4, 2, 32))


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ask as layers that were made in a new process do."""

    def ask() -> None:
        uses = {shape: [False] * len(ROW_CLASSES) for shape in SHAPES[:2]} | {SHAPES[2]: [False]}
        monkeypatch.setattr(products, "_uses", uses)
        monkeypatch.setattr(products, "_choices", {})

    ask()
    return ask


def choose(folder: Path, fake: FakeWays) -> dict[Shape, list[bool]]:
    products.choose_products(this_machine(), lambda: folder, lambda: fake, fake.clock)
    return dict(products._uses)


def test_the_fastest_is_taken_and_remembered(asking: Callable[[], None], tmp_path: Path) -> None:
    fake = FakeWays(faster_from_8_rows)
    uses = choose(tmp_path, fake)
    assert uses[SHAPES[0]] == uses[SHAPES[1]] == [False, False, True, True, True, True, True]
    assert uses[SHAPES[2]] == [False]
    assert {choice.came_from for choice in products.choices()} == {"measured"}
    asking()
    again = FakeWays(lambda *_: 1.0)
    assert choose(tmp_path, again) == uses and again.asked == []
    assert {choice.came_from for choice in products.choices()} == {"kept"}


def test_what_is_hardly_faster_does_not_replace_our_tiles(
    asking: Callable[[], None], tmp_path: Path
) -> None:
    fake = FakeWays(lambda shape, rows, way: 1.0e-4 if way == OWN else 0.95e-4)
    assert not any(map(any, choose(tmp_path, fake).values()))


def test_what_was_in_the_way_of_our_tiles_for_a_moment_does_not_decide(
    asking: Callable[[], None], tmp_path: Path
) -> None:
    """Less than half of the time of a question, of which there are fifteen in half a second."""

    def disturbed(shape: Shape, rows: int, way: str) -> float:
        is_disturbed = fake.now_s < 0.01 and way == OWN
        return 5e-4 if is_disturbed else 1e-4

    fake = FakeWays(disturbed)
    assert not any(map(any, choose(tmp_path, fake).values()))
    assert fake.now_s > 0.01


@pytest.mark.parametrize("seconds", [1e-5, 0.004, 0.03])
def test_all_questions_share_one_budget(
    asking: Callable[[], None], tmp_path: Path, seconds: float
) -> None:
    """The last question of all may be asked a moment before the end, twice each way."""
    fake = FakeWays(lambda *_: seconds)
    choose(tmp_path, fake)
    assert fake.now_s <= BUDGET_S + 2 * 2 * seconds
    unanswered = [each for each in products.choices() if each.came_from == "no time to measure"]
    assert all(each.way == OWN and not each.times for each in unanswered)
    assert len(products.choices()) == 2 * len(ROW_CLASSES) + 1
    assert len(fake.asked) + len(unanswered) == len(products.choices())
    asking()
    later = FakeWays(lambda *_: 1e-5)
    choose(tmp_path, later)
    assert len(later.asked) == len(unanswered), "the next start goes on"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b"64x32", b"64x33", 1),
        lambda text: text[:-20],
        lambda text: b"",
        lambda text: text + b" " * (1 << 18),
    ],
    ids=["changed", "cut", "empty", "long"],
)
def test_a_damaged_file_is_measured_again(
    asking: Callable[[], None], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    uses = choose(tmp_path, FakeWays(faster_from_8_rows))
    path = table.file_of(tmp_path, this_machine())
    path.write_bytes(damage(path.read_bytes()))
    asking()
    again = FakeWays(faster_from_8_rows)
    assert choose(tmp_path, again) == uses
    assert len(again.asked) == 2 * len(ROW_CLASSES) + 1
    assert table.read_times(tmp_path, this_machine()).keys() == products._choices.keys()


def test_times_of_another_machine_are_not_taken(tmp_path: Path) -> None:
    here, times = this_machine(), {"linear 1x1, 1 row": {OWN: 1.0}}
    others: list[Machine] = [
        msgspec.structs.replace(here, **{field: value})
        for field, value in (("processor", "x"), ("features", ()), ("threads", 99), ("torch", "1"))
    ]
    for other in others:
        table.write_times(tmp_path, other, times)
        assert table.read_times(tmp_path, here) == {}
        table.file_of(tmp_path, here).write_bytes(table.file_of(tmp_path, other).read_bytes())
        assert table.read_times(tmp_path, here) == {}, "whatever the file is called"


def test_a_folder_that_cannot_be_written_to_is_no_fault(
    asking: Callable[[], None], tmp_path: Path
) -> None:
    assert choose(tmp_path / "nowhere", FakeWays(faster_from_8_rows))[SHAPES[0]][-1]


@needs_library
def test_a_recorded_step_holds_the_librarys_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played from a program, or run call by call, an engine says the same; and it is played."""
    folder = checkpoints.save("mistral_wide", tmp_path)
    monkeypatch.setattr("engine.core.engine_core.choose_measured", _always_the_library)
    said = [_answer(folder)]
    monkeypatch.setattr("engine.models.decoder.MAX_TOKENS", 0)
    said.append(_answer(folder))
    assert said[0][0] == said[1][0] and len(said[0][0]) == 20
    assert said[0][1] > 0 == said[1][1], "programs that were recorded and are not void"


def _always_the_library(shape: AttentionShape) -> None:
    library_for(shape)
    assert products._uses, "a model of bfloat16 asks"
    for uses in products._uses.values():
        uses[:] = [True] * len(uses)


def _answer(folder: Path) -> tuple[list[int], int]:
    """Return what is said, and how many programs there are to play."""
    core = EngineCore(
        EngineConfig(model=folder, device="cpu", dtype="bfloat16", kv_cache_bytes=1 << 22)
    )
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    core.add(EngineRequest(request_id="a", prompt_token_ids=[*range(3, 60)], sampling=sampling))
    said: list[int] = []
    while core.has_work():
        for output in core.step():
            said += output.token_ids
    model = core._stepper._runner._model
    assert isinstance(model, Decoder)
    return said, sum(program is not None for program in model._programs._programs.values())


@needs_numba
def test_float32_asks_nothing() -> None:
    pack_linear(torch.randn(64, 64), None)
    assert products._uses == {}

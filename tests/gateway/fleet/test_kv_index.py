"""The index of who has what, against a dict: whatever comes and goes, and while another process
writes it."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.prefix_digests import span_keys
from gateway.fleet.conductor.index_writer import KvIndexWriter
from gateway.fleet.kv_index import AT_REPLACED, LOOK_AGAIN_S, PLACES, KvIndex, map_table
from tests.budget import examples
from tests.engine.scheduling.scheduling import Clock

ENGINES = [f"engine {number}" for number in range(5)]
KEYS = st.lists(st.integers(1, 60).map(lambda n: n * 64), max_size=30)
"""All have one slot in a small table, so that searches are long."""


def packed(*keys: int) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)


def longest(prompt: list[int], held: set[int]) -> int:
    return sum(1 for _ in takewhile(held.__contains__, prompt))


class Machine(RuleBasedStateMachine):
    """Engines that hold any spans, not only those of whole prefixes: prompts here are one span."""

    @initialize()
    def start(self) -> None:
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "index"
        self.reader = KvIndex(self.path, clock=lambda: 0.0)
        self.engines: dict[str, set[int]] = {}
        self.begin()

    def begin(self) -> None:
        self.writer = KvIndexWriter(self.path, min_capacity=64, max_capacity=1024)
        self.writer.publish()

    @rule(engine=st.sampled_from(ENGINES), size=st.integers(0, 50))
    def come(self, engine: str, size: int) -> None:
        if engine not in self.engines:
            assert self.writer.add(engine, size)
            self.engines[engine] = set()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), keys=KEYS)
    def store(self, data: st.DataObject, keys: list[int]) -> None:
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.writer.store(engine, packed(*keys))
        self.engines[engine] |= set(keys)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), keys=KEYS)
    def remove(self, data: st.DataObject, keys: list[int]) -> None:
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.writer.remove(engine, packed(*keys))
        self.engines[engine] -= set(keys)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), keys=KEYS)
    def tell_anew(self, data: st.DataObject, keys: list[int]) -> None:
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.writer.clear(engine)
        self.writer.store(engine, packed(*keys))
        self.engines[engine] = set(keys)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.writer.drop(engine)
        del self.engines[engine]

    @rule(first=st.integers(4000, 5000))
    def pass_through(self, first: int) -> None:
        """Many spans come and go: their slots stay taken until all moves."""
        if self.engines:
            engine = min(self.engines)
            keys = packed(*range(first, first + 20))
            self.writer.store(engine, keys)
            self.writer.remove(engine, keys)

    @rule()
    def start_another_writer(self) -> None:
        """As after the death of the one before: all engines tell anew."""
        self.begin()
        for engine, held in self.engines.items():
            self.writer.add(engine, 0)
            self.writer.store(engine, packed(*held))

    @invariant()
    def readers_see_what_there_is(self) -> None:
        if not hasattr(self, "engines"):
            return
        asked = tuple(ENGINES)
        for key in {64, 128, 4010}.union(*self.engines.values()):
            expected = [int(key in self.engines.get(each, ())) for each in asked]
            assert self.reader.spans_held([key], asked) == expected
        state = self.reader.state()
        assert state is not None and state.spans == len(set().union(*self.engines.values()))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


Machine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20)
TestMachine = Machine.TestCase


@pytest.fixture
def writer(tmp_path: Path) -> KvIndexWriter:
    made = KvIndexWriter(tmp_path / "index")
    made.publish()
    return made


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    asked=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60))
def test_the_longest_prefix_of_each_is_found(lengths: list[int], asked: int, seed: int) -> None:
    """Doubling and halving finds what a walk does: an engine that has a span has those before."""
    draw = random.Random(seed)
    prompt = [draw.getrandbits(64) | 1 for _ in range(40)]
    engines = tuple(f"engine {number}" for number in range(len(lengths)))
    with TemporaryDirectory() as folder:
        writer = KvIndexWriter(Path(folder) / "index")
        for engine, length in zip(engines, lengths, strict=True):
            writer.add(engine, length)
            writer.store(engine, packed(*prompt[:length]))
        writer.publish()
        index = KvIndex(Path(folder) / "index")
        found = index.spans_held(prompt[:asked], ("a stranger", *engines))
    assert found == [0, *(min(length, asked) for length in lengths)]


@given(
    held=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4),
    asked=st.integers(0, 12),
    window=st.integers(1, 40),
)
@settings(max_examples=examples(60))
def test_of_a_window_the_last_spans_are_enough(
    held: list[set[int]], asked: int, window: int
) -> None:
    """A prefix is cached if the blocks are that its next token sees."""
    prompt = [1000 + n for n in range(12)]
    engines = tuple(f"engine {number}" for number in range(len(held)))
    with TemporaryDirectory() as folder:
        writer = KvIndexWriter(Path(folder) / "index")
        for engine, spans in zip(engines, held, strict=True):
            writer.add(engine, len(spans))
            writer.store(engine, packed(*(prompt[span] for span in spans)))
        writer.publish()
        index = KvIndex(Path(folder) / "index")
        found = index.spans_held(prompt[:asked], engines, sliding_window=window, span_tokens=4)

    def sees(end: int) -> range:
        return range(max(0, 4 * end - window + 1) // 4, end)

    for spans, number in zip(held, found, strict=True):
        expected = (end for end in range(asked, 0, -1) if spans.issuperset(sees(end)))
        assert number == next(expected, 0)


def test_without_a_table_nobody_has_anything(tmp_path: Path) -> None:
    clock = iter([0.0, 0.5, 1.5, 1.5, 1.5])
    index = KvIndex(tmp_path / "index", clock=clock.__next__)
    assert index.spans_held([1], ("a",)) == [0] and index.state() is None
    (tmp_path / "index").write_bytes(b"something else" * 1000)
    later = KvIndex(tmp_path / "index")
    assert later.spans_held([1], ("a",)) == [0]


def test_the_table_of_a_writer_that_died_is_read_on(tmp_path: Path, writer: KvIndexWriter) -> None:
    writer.add("a", 10)
    writer.store("a", packed(1, 2))
    index = KvIndex(tmp_path / "index", clock=lambda: 0.0)
    assert index.spans_held([1, 2, 3], ("a",)) == [2]
    (tmp_path / "index").unlink()
    assert index.spans_held([1, 2, 3], ("a",)) == [2]
    heir = KvIndexWriter(tmp_path / "index")
    assert index.spans_held([1, 2, 3], ("a",)) == [2], "not yet shown"
    heir.publish()
    assert map_table(tmp_path / "index")[AT_REPLACED] == 0


def test_a_table_that_took_the_path_of_another_unnoticed_is_found_in_time(tmp_path: Path) -> None:
    """As by a writer that died before it could mark the last one as replaced."""
    path, clock = tmp_path / "index", Clock()
    for name, key in (("index", 1), ("later", 2)):
        writer = KvIndexWriter(tmp_path / name)
        writer.add("a", 10)
        writer.store("a", packed(key))
        writer.publish()
        if name == "index":
            index = KvIndex(path, clock=clock)
            assert index.spans_held([1], ("a",)) == [1]
    (tmp_path / "later").replace(path)
    clock.now += LOOK_AGAIN_S
    assert index.spans_held([1], ("a",)) == [0] and index.spans_held([2], ("a",)) == [1]
    path.unlink()
    clock.now += LOOK_AGAIN_S
    assert index.spans_held([2], ("a",)) == [1], "it is better than nothing"


def test_a_table_that_was_never_shown_is_not_emptied_under_who_has_it(tmp_path: Path) -> None:
    """As one that a writer left which was killed before it could show it."""
    first = KvIndexWriter(tmp_path / "index")
    first.add("a", 10)
    first.store("a", packed(1, 2))
    left = (tmp_path / "index.new").stat().st_ino
    second = KvIndexWriter(tmp_path / "index")
    assert (tmp_path / "index.new").stat().st_ino != left
    assert (first.num_spans, second.num_spans) == (2, 0)
    second.publish()
    assert [each.name for each in tmp_path.iterdir()] == ["index"], "nothing is left over"


def test_a_full_table_leaves_spans_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = KvIndexWriter(tmp_path / "index", min_capacity=64, max_capacity=64)
    writer.publish()
    writer.add("a", 1000)
    for first in range(1, 100, 10):
        writer.store("a", packed(*range(first, first + 10)))
    assert writer.num_spans == 32 and writer.capacity == 64
    assert caplog.text.count("is full") == 1
    writer.remove("a", packed(*range(1, 100)))
    writer.store("a", packed(*range(500, 520)))
    assert writer.num_spans == 20, "slots of what is gone are used again"


def test_more_engines_than_places_are_not_known(writer: KvIndexWriter) -> None:
    assert all(writer.add(f"{number}", 1) for number in range(PLACES))
    assert not writer.add("one more", 1)
    writer.drop("77")
    assert writer.add("one more", 1)


def test_nobody_gets_a_hit_by_what_another_tenant_sent(
    tmp_path: Path, writer: KvIndexWriter
) -> None:
    prompt = [*range(1000)]
    writer.add("a", 100)
    writer.store("a", packed(*span_keys("salt of org 1", prompt, 16)))
    index = KvIndex(tmp_path / "index")
    assert index.spans_held(span_keys("salt of org 1", prompt, 16), ("a",)) == [7]
    assert index.spans_held(span_keys("salt of org 2", prompt, 16), ("a",)) == [0]


WRITES = """
import random, sys
from pathlib import Path
from gateway.fleet.conductor.index_writer import KvIndexWriter

writer, draw = KvIndexWriter(Path(sys.argv[1]), min_capacity=256), random.Random(7)
engines = [f"engine {number}" for number in range(100)]
for engine in engines:
    writer.add(engine, 0)
writer.publish()
print("shown", flush=True)
while True:
    number = draw.randrange(100)
    keys = b"".join((100 * draw.randrange(1, 300) + number).to_bytes(8, "little") for _ in range(9))
    (writer.store if draw.random() < 0.6 else writer.remove)(engines[number], keys)
    if draw.random() < 0.02:
        writer.drop(engines[number])
        writer.add(engines[number], draw.randrange(300))
"""


def test_a_reader_beside_the_writer_never_sees_anothers_spans(tmp_path: Path) -> None:
    """Engine n has keys that leave the rest n alone. The writer is killed amid its work."""
    engines = tuple(f"engine {number}" for number in range(100))
    command = [sys.executable, "-c", WRITES, str(tmp_path / "index")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"shown\n"
            index, draw, num_hits = KvIndex(tmp_path / "index"), random.Random(8), 0
            tables: list[memoryview | None] = [None]
            while num_hits < 2000 or len(tables) < 4:
                key = draw.randrange(100, 30_000)
                held = index.spans_held([key], engines)
                owner = key % 100
                assert not any(held[:owner]) and not any(held[owner + 1 :])
                num_hits += held[owner]
                if index._words is not tables[-1]:
                    tables.append(index._words)
        finally:
            process.kill()

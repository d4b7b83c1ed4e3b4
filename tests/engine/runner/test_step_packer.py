"""Checks what a step sends to the device: whole tables arrive there, but only changes are sent."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.step_inputs.dispatch import complete_reference
from engine.kernels.step_inputs.types import StepInputs
from engine.protocol import SamplingParams
from engine.runner.batch.batch import lay_out
from engine.runner.device.device_buffers import ALIGNMENT, KINDS, StepLayout, StepSize
from engine.runner.device.step_packer import KNOWN, UNUSED_SLOT, KeptTables, StepPacker
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import FREED, Sequence, SequenceStatus
from tests.budget import examples

NUM_ROWS = 3
MAX_BLOCKS = 12
BLOCK_SIZE = 4


def sequence(number: int, num_tokens: int = 1) -> Sequence:
    seq = Sequence(
        request_id=str(number),
        index=0,
        order=(number, 0),
        prompt_token_ids=list(range(num_tokens)),
        sampling=SamplingParams(max_tokens=9, temperature=0.5),
        seed=(1 << 64) - 1 - number,
        cache_salt="",
    )
    seq.status = SequenceStatus.RUNNING
    return seq


class Tables:
    """Sequences that come, grow, slide, exchange blocks, are preempted and go; and a device that
    knows what it was sent."""

    def __init__(self) -> None:
        self.kept = KeptTables(NUM_ROWS)
        self.device = np.full((NUM_ROWS, MAX_BLOCKS), -99)
        self.running: list[Sequence] = []
        self.num_sent = 0
        self.number = 0

    def step(self, seqs: list[Sequence], arrives: bool) -> None:
        rows = self.kept.rows_of(seqs)
        assert len(set(rows)) == len(rows)
        for seq, row in zip(seqs, rows, strict=True):
            first, new = self.kept.changes(seq)
            self.num_sent += len(new)
            if arrives:
                self.device[row, first : first + len(new)] = new
        if not arrives:
            self.kept.forget()
            return
        for seq, row in zip(seqs, rows, strict=True):
            start, stop = seq.num_freed_blocks, len(seq.block_table)
            assert self.device[row, start:stop].tolist() == seq.block_table[start:]


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_the_device_has_the_tables_of_every_step(data: st.DataObject) -> None:
    tables = Tables()
    blocks = st.integers(0, 40)
    for _ in range(data.draw(st.integers(1, 25))):
        for seq in tables.running:
            change = data.draw(st.sampled_from(["none", "none", "grow", "slide", "swap", "again"]))
            table = seq.block_table
            if change == "grow" and len(table) < MAX_BLOCKS:
                table.append(data.draw(blocks))
            elif change == "slide" and seq.num_freed_blocks < len(table) - 1:
                table[seq.num_freed_blocks] = FREED
                seq.num_freed_blocks += 1
            elif change == "swap":
                table[-1] = data.draw(blocks)
            elif change == "again":
                seq.num_freed_blocks = 0
                seq.block_table = data.draw(st.lists(blocks, min_size=1, max_size=MAX_BLOCKS))
        if tables.running and data.draw(st.booleans()):
            tables.running.pop(0).status = SequenceStatus.FINISHED
        if len(tables.running) < NUM_ROWS and data.draw(st.booleans()):
            seq = sequence(tables.number)
            seq.num_freed_blocks = data.draw(st.integers(0, 3))
            own = data.draw(st.lists(blocks, min_size=1, max_size=8))
            seq.block_table = [FREED] * seq.num_freed_blocks + own
            tables.running.append(seq)
            tables.number += 1
        present = [seq for seq in tables.running if data.draw(st.booleans())]
        tables.step(present, arrives=data.draw(st.integers(0, 9)) > 0)


def test_what_did_not_change_is_not_sent() -> None:
    tables, seq = Tables(), sequence(0)
    seq.block_table = list(range(8))
    for _ in range(5):
        tables.step([seq], arrives=True)
    assert tables.num_sent == 8
    seq.block_table.append(8)
    tables.step([seq], arrives=True)
    assert tables.num_sent == 9
    seq.block_table[:2], seq.num_freed_blocks = [FREED, FREED], 2
    tables.step([seq], arrives=True)
    assert tables.num_sent == 9


def decode_of(lengths: list[int], pending: list[bool]) -> SchedulerOutput:
    """Sequences of so many tokens, the last of which is computed; it may be pending."""
    entries = []
    for number, (length, later) in enumerate(zip(lengths, pending, strict=True)):
        seq = sequence(number, length - later)
        seq.block_table = list(range(10 * number, 10 * number - -length // BLOCK_SIZE))
        entries.append(ScheduledSequence(seq, 1, length - 1, True, 0, 0))
    return SchedulerOutput(entries, [], len(entries))


@given(
    decodes=st.lists(st.tuples(st.integers(2, 38), st.booleans()), min_size=1, max_size=6),
    padding=st.integers(0, 3),
)
@settings(max_examples=examples(60), deadline=None)
def test_a_packed_decode(decodes: list[tuple[int, bool]], padding: int) -> None:
    """Into memory full of something else: every input is written, padding included."""
    lengths, pending = [length for length, _ in decodes], [later for _, later in decodes]
    output = decode_of(lengths, pending)
    parts = lay_out(output)
    num = len(decodes)
    layout = StepLayout(StepSize(*[num + padding] * 3))
    memory = np.full(layout.fixed_bytes + 4 * 6 * MAX_BLOCKS, 0x7F, np.uint8)
    packer = StepPacker(max_num_seqs=6, block_size=BLOCK_SIZE, vocab_size=100)
    previous = {(str(i), 0): 50 + i for i in range(num)}
    num_bytes = packer.pack(parts, previous, layout, memory)
    at = layout.on_device(torch.from_numpy(memory))
    assert num_bytes == layout.fixed_bytes + 4 * sum(-(-length // BLOCK_SIZE) for length in lengths)
    assert not any(view.data_ptr() % ALIGNMENT for view in at.values())
    assert at.keys() == KINDS.keys()

    tables = torch.full((num + padding, 16), -99, dtype=torch.int32)
    inputs = StepInputs(**{name: at[name] for name in StepInputs._fields})
    drawn, kept = torch.arange(200, 260), torch.full((6, 16), -99, dtype=torch.int32)
    complete_reference(inputs, drawn, kept, tables, BLOCK_SIZE)
    order = sorted(range(num), key=lambda i: -lengths[i])
    for row, i in enumerate(order):
        seq = output.scheduled[i].seq
        last = 250 + i if pending[i] else lengths[i] - 1
        assert at["token_ids"][row] == last
        assert at["positions"][row] == lengths[i] - 1 and at["seq_lens"][row] == lengths[i]
        block = (lengths[i] - 1) // BLOCK_SIZE
        assert tables[row, : block + 1].tolist() == seq.block_table
        slot = seq.block_table[block] * BLOCK_SIZE + (lengths[i] - 1) % BLOCK_SIZE
        assert at["slots"][row] == slot
        assert at["seeds"][row].item() % (1 << 64) == seq.seed
        assert at["temperature"][row] == 0.5
    assert at["query_start"].tolist() == [min(i, num) for i in range(num + padding + 1)]
    assert at["sampling_rows"].tolist() == list(range(num + padding))
    assert at["slots"][num:].tolist() == [UNUSED_SLOT] * padding
    assert at["seq_lens"][num:].tolist() == at["num_changed"][num:].tolist() == [0] * padding
    assert at["previous_rows"][num:].tolist() == [KNOWN] * padding
    assert at["temperature"][num:].tolist() == [0.0] * padding

"""From a scheduled step to its inputs in staging memory.

Knows no model. Works with numpy: nothing here touches the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from engine.runner.batch.batch import StepParts
from engine.runner.device.device_buffers import StepLayout
from engine.runner.sampling.sampling_tensors import plain_parameters
from engine.sequence import FREED, Key, Sequence, SequenceStatus

UNUSED_SLOT = -1
KNOWN = -1


class KeptTables:
    """The block tables that the device keeps: a row for each running sequence, and what is in it.

    Rows of sequences that run no more are given to others when none is left. Work on the device is
    done in order, so a row can change hands while a step that reads it is still queued.
    """

    def __init__(self, num_rows: int) -> None:
        self._row_of: dict[Sequence, int] = {}
        self._free = list(range(num_rows))
        self._sent: list[list[int]] = [[] for _ in range(num_rows)]

    def rows_of(self, seqs: Rows[Sequence]) -> list[int]:
        """The row of each sequence of a step."""
        new = [seq for seq in seqs if seq not in self._row_of]
        if len(new) > len(self._free):
            self._reclaim(frozenset(seqs))
        for seq in new:
            self._row_of[seq] = self._free.pop()
        return [self._row_of[seq] for seq in seqs]

    def changes(self, seq: Sequence) -> tuple[int, list[int]]:
        """First entry of the sequence's table that its row does not hold, and all from there on.
        They count as sent."""
        sent, table = self._sent[self._row_of[seq]], seq.block_table
        # What is outside the window is read by nobody.
        first = seq.num_freed_blocks
        sent += [FREED] * (first - len(sent))
        if first < len(sent) and table[first : len(sent)] == sent[first:]:
            first = len(sent)
        else:
            pairs = zip(table[first:], sent[first:], strict=False)
            first += next((i for i, (new, old) in enumerate(pairs) if new != old), 0)
        new = table[first:]
        sent[first:] = new
        return first, new

    def forget(self) -> None:
        """Count nothing as sent: the device may not have got it."""
        self._sent = [[] for _ in self._sent]

    def _reclaim(self, needed: frozenset[Sequence]) -> None:
        for seq in list(self._row_of):
            if seq not in needed and seq.status is not SequenceStatus.RUNNING:
                self._free.append(self._row_of.pop(seq))


class StepPacker:
    def __init__(self, *, max_num_seqs: int, block_size: int, vocab_size: int) -> None:
        self._tables = KeptTables(max_num_seqs)
        self._block_size = block_size
        self._vocab_size = vocab_size

    def pack(
        self,
        parts: StepParts,
        previous: Mapping[Key, int],
        layout: StepLayout,
        memory: NDArray[np.uint8],
    ) -> int:
        """Write the step's inputs into `memory`; how many bytes they are. Whatever `layout` has
        room for beyond the step is padding: sequences without a token, whose keys go nowhere.

        previous: the row of the step before that samples the last token of a sequence.
        """
        at = layout.on_host(memory)
        _fill(at["token_ids"], parts.token_ids, 0)
        _fill(at["positions"], parts.positions, 0)
        _fill(at["slots"], self._slots(parts), UNUSED_SLOT)
        starts = np.concatenate([[0], np.cumsum(parts.query_lens)])
        _fill(at["query_start"], starts, starts[-1])
        _fill(at["seq_lens"], parts.seq_lens, 0)
        pending = np.full(len(parts.entries), KNOWN)
        for number, key in parts.unknown:
            pending[number] = previous[key]
        _fill(at["previous_rows"], pending, KNOWN)
        self._pack_draws(at, parts)
        return layout.fixed_bytes + self._pack_tables(at, parts)

    @staticmethod
    def pad(layout: StepLayout, memory: NDArray[np.uint8]) -> int:
        """Write a step of nothing but padding; how many bytes it is."""
        at = layout.on_host(memory)
        unlike_zero = {"slots": UNUSED_SLOT, "previous_rows": KNOWN}
        for name, field in at.items():
            if name != "changes":
                _fill(field, [], unlike_zero.get(name, 0))
        at["sampling_rows"][:] = np.arange(layout.size.num_rows)
        return layout.fixed_bytes

    def forget(self) -> None:
        """The device may not have got what was packed last."""
        self._tables.forget()

    def _pack_draws(self, at: Mapping[str, NDArray[np.generic]], parts: StepParts) -> None:
        rows = at["sampling_rows"]
        _fill(rows, parts.sampling_rows, 0)
        # Rows of padding are those of their own tokens, which nobody looks at.
        rows[len(parts.rows) :] = np.arange(len(parts.rows), len(rows))
        plain = plain_parameters(parts.rows, self._vocab_size)
        plain["draw_positions"] = plain.pop("positions")
        for name, values in plain.items():
            _fill(at[name], values, 0)

    def _pack_tables(self, at: Mapping[str, NDArray[np.generic]], parts: StepParts) -> int:
        """Bytes of changes."""
        seqs = [entry.seq for entry in parts.entries]
        rows = self._tables.rows_of(seqs)
        found = [self._tables.changes(seq) for seq in seqs]
        counts = np.array([len(new) for _, new in found])
        changes = [block for _, new in found for block in new]
        _fill(at["table_rows"], rows, 0)
        _fill(at["first_changed"], [first for first, _ in found], 0)
        _fill(at["num_changed"], counts, 0)
        _fill(at["changes_at"], np.cumsum(counts) - counts, 0)
        at["changes"][: len(changes)] = changes
        return len(changes) * at["changes"].itemsize

    def _slots(self, parts: StepParts) -> NDArray[np.int64]:
        """[T] block * block_size + offset of each token."""
        size = self._block_size
        slots = np.empty(len(parts.token_ids), np.int64)
        start = 0
        for entry in parts.entries:
            first, count, table = entry.start, entry.num_new_tokens, entry.seq.block_table
            if count == 1:
                slots[start] = table[first // size] * size + first % size
            else:
                blocks = np.array(table[first // size : (first + count - 1) // size + 1])
                at = np.arange(first % size, first % size + count)
                slots[start : start + count] = blocks[at // size] * size + at % size
            start += count
        return slots


def _fill(
    field: NDArray[np.generic], values: Rows[int] | NDArray[np.generic], padding: int
) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding

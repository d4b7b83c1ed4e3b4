"""Fills in what only the device can know of a step's inputs: pending tokens, and the tables of
blocks.

Knows no requests.

The host sends a step without the tokens that the step before samples: it does not know them yet.
Nor does it send whole block tables, which would be 4 MB for 256 sequences of 4,096 blocks: the
device keeps one for each sequence and is sent the entries that changed. For each sequence s

    token_ids[query_start[s + 1] - 1] = drawn[previous_rows[s]]     where previous_rows[s] >= 0
    kept[table_rows[s], first : first + count] = changes[at : at + count]
    tables[s, : blocks of s] = kept[table_rows[s], : blocks of s]
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.backend import uses_triton
from engine.kernels.step_inputs.types import StepInputs


def complete(
    step: StepInputs, drawn: Tensor, kept: Tensor, tables: Tensor, block_size: int
) -> None:
    """drawn: int64 [any], negative where nothing could be drawn: such a sequence has ended, and any
    token will do. kept, tables: int32 [any, blocks], rows of one stride; changed in place."""
    assert kept.stride() == tables.stride()
    if uses_triton(kept.device):
        from engine.kernels.step_inputs import triton as step_inputs_triton

        step_inputs_triton.complete(step, drawn, kept, tables, block_size)
    else:
        complete_reference(step, drawn, kept, tables, block_size)


def complete_reference(
    step: StepInputs, drawn: Tensor, kept: Tensor, tables: Tensor, block_size: int
) -> None:
    for seq, seq_len in enumerate(step.seq_lens.tolist()):
        row = int(step.previous_rows[seq])
        if row >= 0:
            step.token_ids[int(step.query_start[seq + 1]) - 1] = drawn[row].clamp(min=0)
        first, count, at = (
            int(column[seq]) for column in (step.first_changed, step.num_changed, step.changes_at)
        )
        own = kept[int(step.table_rows[seq])]
        own[first : first + count] = step.changes[at : at + count]
        num_blocks = -(-seq_len // block_size)
        tables[seq, :num_blocks] = own[:num_blocks]

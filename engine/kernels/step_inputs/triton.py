"""Pending tokens and block tables of a step, by one program for each sequence.

Grid (S). A program walks over its table once: an entry comes from the changes or from the table
that is kept, goes to the step's table and, if it changed, to the kept one. Bytes: 8 a block of the
step's sequences, 12 a changed one: nothing beside the keys that lie in them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.aot import AotCase
from engine.kernels.step_inputs.types import StepInputs

BLOCK = 256
"""Entries of a table copied at once."""


@triton.jit
def _complete_kernel(
    token_ids_ptr, query_start_ptr, seq_lens_ptr, previous_rows_ptr, table_rows_ptr,
    first_changed_ptr, num_changed_ptr, changes_at_ptr, changes_ptr, drawn_ptr, kept_ptr,
    tables_ptr, stride, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = tl.load(previous_rows_ptr + seq)
    if row >= 0:
        last = tl.load(query_start_ptr + seq + 1) - 1
        tl.store(token_ids_ptr + last, tl.maximum(tl.load(drawn_ptr + row), 0))
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + seq), BLOCK_SIZE)
    first = tl.load(first_changed_ptr + seq)
    stop = first + tl.load(num_changed_ptr + seq)
    changes = changes_ptr + tl.load(changes_at_ptr + seq) - first
    kept = kept_ptr + tl.load(table_rows_ptr + seq).to(tl.int64) * stride
    table = tables_ptr + seq.to(tl.int64) * stride
    for start in range(0, tl.maximum(num_blocks, stop), BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_blocks
        changed = (at >= first) & (at < stop)
        old = tl.load(kept + at, mask=inside & (changed == 0), other=0)
        new = tl.load(changes + at, mask=changed, other=0)
        tl.store(kept + at, new, mask=changed)
        tl.store(table + at, tl.where(changed, new, old), mask=inside)


def complete(
    step: StepInputs, drawn: Tensor, kept: Tensor, tables: Tensor, block_size: int
) -> None:
    """As `engine.kernels.step_inputs.dispatch.complete`."""
    num_seqs = step.seq_lens.shape[0]
    if num_seqs == 0:
        return
    _complete_kernel[(num_seqs,)](
        step.token_ids, step.query_start, step.seq_lens, step.previous_rows, step.table_rows,
        step.first_changed, step.num_changed, step.changes_at, step.changes, drawn, kept, tables,
        kept.stride(0), BLOCK_SIZE=block_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def _aot() -> AotCase:
    constexprs = {"BLOCK_SIZE": 16, "BLOCK": BLOCK}
    kinds = {"token_ids_ptr": "*i64", "drawn_ptr": "*i64", "stride": "i32:16"}
    arguments = [name for name in _complete_kernel.arg_names if name not in constexprs]
    signature = {name: kinds.get(name, "*i32") for name in arguments}
    return AotCase("step_inputs", _complete_kernel, signature, constexprs)


AOT = [_aot()]

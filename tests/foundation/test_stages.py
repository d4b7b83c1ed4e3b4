"""Stages have their times and a bound, and cost next to nothing."""

from __future__ import annotations

import asyncio

import pytest

from foundation.request_context import LOG_CONTEXT, LogContext, current_stages
from foundation.stages import MAX_STAGES, Stages

REQUEST = "req_" + "1" * 32


def test_a_stage_has_its_times_and_what_ended_it() -> None:
    stages = Stages()
    with stages.begin("admit"):
        assert not stages.have_ended
    with pytest.raises(KeyError), stages.begin("attempt", "m/0") as failed:
        raise KeyError
    with stages.begin("attempt", "m/1") as left:
        left.outcome = "left"
    assert [(each.name, each.about, each.outcome) for each in stages] == [
        ("admit", "", ""),
        ("attempt", "m/0", "KeyError"),
        ("attempt", "m/1", "left"),
    ]
    assert stages.have_ended and failed.began_at <= failed.ended_at <= left.began_at


def test_a_long_loop_of_tools_has_a_bounded_number_of_stages() -> None:
    stages = Stages()
    for _ in range(MAX_STAGES + 3):
        with stages.begin("tool_call", "server/tool") as last:
            pass
    assert (len(stages), stages.num_left_out) == (MAX_STAGES, 3)
    assert last.has_ended


async def test_tasks_of_a_request_write_to_its_stages_and_others_to_none() -> None:
    async def work() -> None:
        with current_stages().begin("prepare"):
            pass

    mine, others = LogContext(REQUEST), LogContext(REQUEST)
    LOG_CONTEXT.set(mine)
    await asyncio.create_task(work())
    LOG_CONTEXT.set(None)
    await asyncio.create_task(work())
    assert [stage.name for stage in mine.stages] == ["prepare"]
    assert not others.stages

"""A planner learns how long engines take to read prompts of each other."""

from __future__ import annotations

import msgspec
import pytest

from bench.sim.world import IDLE
from engine.protocol import PeerStatus, ReplicaStatus
from gateway.fleet.planner.model_watch import Learnt, ModelWatch
from gateway.fleet.planner.sizing import PromptTransfer
from gateway.fleet.sent_work import AskedWork


def engine(read_token_s: float | None, fetched_tokens: int = 0) -> ReplicaStatus:
    """Return what an engine says; None: nobody reads of it, and it reads of nobody."""
    peer = None
    if read_token_s is not None:
        peer = PeerStatus(address="unix:/kv", layout=b"", read_s=0.01, read_token_s=read_token_s)
    return msgspec.structs.replace(IDLE, peer=peer, fetched_tokens=fetched_tokens)


def transfer_of(*statuses: ReplicaStatus, learnt: Learnt | None = None) -> PromptTransfer | None:
    """Return the transfer that is counted on after two prompts of 1,000 and 3,000 tokens."""
    watch, asked = ModelWatch(0.0, learnt), AskedWork()
    watch.observe(5.0, 1, asked.by_column(), statuses)
    for tokens in (1_000, 3_000):
        asked.note("interactive", 0.5, tokens=tokens)
    asked.note("batch", 0.5, tokens=9_000)
    seen = watch.observe(10.0, 1, asked.by_column(), statuses)
    if learnt is not None:
        assert watch.learnt.reading == learnt.reading
    return seen.load.transfer


def test_the_engine_that_read_most_tells_how_long_it_takes() -> None:
    found = transfer_of(engine(9e-5), engine(2e-5, 64), engine(1e-5, 5_000))
    assert found is not None and found.is_learnt
    assert (found.tokens, found.seconds) == (2_000, pytest.approx(0.03))


def test_before_any_has_read_it_is_assumed_and_afterwards_remembered() -> None:
    found = transfer_of(engine(9e-5))
    assert found is not None and not found.is_learnt
    assert found.seconds == pytest.approx(0.19)
    found = transfer_of(engine(9e-5), learnt=Learnt(reading=(0.02, 2e-5)))
    assert found is not None and found.is_learnt
    assert found.seconds == pytest.approx(0.06)


def test_engines_that_nobody_can_read_make_no_transfer() -> None:
    assert transfer_of(engine(None)) is None
    assert transfer_of(engine(None), learnt=Learnt(reading=(0.02, 2e-5))) is None

"""Conversations that hypothesis makes up, on all surfaces of a running worker in front of an engine
without a model: no answer is a 5xx, none hangs, streams are whole to their last event and say what
the whole answer says, and every token is on the bill, once."""

from __future__ import annotations

import pytest

from tests.gateway.fuzz.conversations import SURFACES
from tests.gateway.fuzz.world import World

FEW, FEWER = 60, 30
"""Examples for a surface that generates tokens, and for one that does not."""


@pytest.mark.slow
@pytest.mark.parametrize("surface", SURFACES)
def test_whatever_is_asked_is_answered_or_refused_and_billed_once(
    world: World, surface: str
) -> None:
    world.asker.try_all(surface, FEW if SURFACES[surface].streams else FEWER)
    world.check_books()

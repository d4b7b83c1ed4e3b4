"""`bench.fleet roles`: where a model's engines serve more requests in time when some of them
compute prompts for the others than when each does both.

As many replicas in each layout, on virtual time, with the routing that Tollgate ships. A request is
good where its first token comes within the one objective, and its others follow, on average, within
the other. What a prompt takes to be read from another replica is its KV over the link's speed; of
each replica one prompt is read after the other.

Behind each row is what the planner says that is shipped, for nine requests of ten: so many that do
both, or so many of either role.

With `--live`: real engines, and what is read of each other (`bench.fleet.pools.live_roles`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import msgspec

from bench.fleet.ours import PredictedTime, PredictedTimeByRole
from bench.fleet.pools.live_roles import run_live
from bench.fleet.routers import gpu_cost, parser_of, traces_of
from bench.fleet.trace import CONVERSATION, DOCUMENTS, TracedRequest
from bench.fleet.world import READ_S, FleetSetup, FleetWorld, RequestFate
from bench.gpu.models import LLAMA_8B, shape_of
from bench.sim.world import IDLE
from gateway.fleet.planner.sizing import PoolLoad, PromptTransfer, replicas_needed, roles_needed
from gateway.fleet.predicted_time import StepPrice
from gateway.lanes import Slo

TTFTS_S = (0.25, 0.5, 1.0, 2.0, 5.0)
TPOTS_S = (0.008, 0.010, 0.0125, 0.015, 0.02, 0.03, 0.05, 0.1)
CLEAR = 0.01
"""Shares of good requests that differ by less are alike."""
TARGET = 0.9
"""The share of good requests that is planned for."""
MOST_PLANNED = 32


class Layout(msgspec.Struct, frozen=True):
    name: str
    num_prefill: int = 0
    max_step_tokens: int = 2_048

    def run(
        self, requests: Sequence[TracedRequest], setup: FleetSetup, ttft_s: float
    ) -> list[RequestFate]:
        setup = msgspec.structs.replace(
            setup, num_prefill=self.num_prefill, max_step_tokens=self.max_step_tokens
        )
        world, rng = FleetWorld(setup), random.Random(1)
        if self.num_prefill:
            return world.run(requests, PredictedTimeByRole(world, rng, ttft_s))
        return world.run(requests, PredictedTime(world, rng))


LAYOUTS = (
    Layout("8 both"),
    Layout("8 both, 512 a step", max_step_tokens=512),
    Layout("2 + 6", num_prefill=2),
    Layout("3 + 5", num_prefill=3),
    Layout("4 + 4", num_prefill=4),
)


def good_share(fates: Sequence[RequestFate], ttft_s: float, tpot_s: float) -> float:
    return sum(f.ttft_s <= ttft_s and f.tpot_s <= tpot_s for f in fates) / len(fates)


def load_of(fates: Sequence[RequestFate], setup: FleetSetup) -> PoolLoad:
    """Return what a planner would know of a trace that was served."""
    cost = setup.cost
    price = StepPrice.of(
        msgspec.structs.replace(IDLE, max_step_tokens=setup.max_step_tokens), setup.cost
    )
    seconds = [price.idle_seconds(each.asked.input_length - each.cached) for each in fates]
    asked = [each.asked for each in fates]
    answers = sum(each.output_length for each in asked)
    context = sum(e.output_length * (e.input_length + e.output_length / 2) for e in asked) / answers
    span_s = max(1.0, asked[-1].arrival_s)
    rate = len(asked) / span_s
    tokens = fmean(each.input_length for each in asked)
    return PoolLoad(
        prompts_s=rate * fmean(seconds),
        decodes_s=answers / span_s * (cost.decode_s + cost.context_token_s * context),
        mean_prompt_s=fmean(seconds),
        residual_s=sum(each * each for each in seconds) / (2 * sum(seconds)),
        step_s=cost.step_s,
        rate=rate,
        answer_tokens=answers / len(asked),
        transfer=PromptTransfer(
            seconds=READ_S + setup.read_token_s * tokens, tokens=tokens, is_learnt=True
        ),
    )


def planned(load: PoolLoad, slo: Slo) -> str:
    """Say how many replicas the planner wants that do both, and how many of either role."""
    both = replicas_needed(load, slo, TARGET, MOST_PLANNED)
    roles = roles_needed(load, slo, TARGET, MOST_PLANNED)
    said = f"{both}" if both < MOST_PLANNED else "no number"
    return f"{said} or " + ("no roles" if roles is None else f"{roles[0]} + {roles[1]}")


def main(command: str, arguments: list[str]) -> int:
    parser = parser_of(command, __doc__ or "")
    parser.set_defaults(speed=2.0)
    parser.add_argument("--gb-per-s", type=float, default=12.0, help="of the link between replicas")
    live = parser.add_argument_group("with --live, in place of the simulation")
    live.add_argument("--live", action="store_true", help="engines of penny on this machine")
    live.add_argument("--rate", type=float, default=1.5, help="requests a second")
    live.add_argument("--rounds", type=int, default=3, help="of each layout, in turns")
    live.add_argument("--seed", type=int, default=1)
    live.add_argument(
        "--machine-was", choices=("busy", "quiet"), default="busy", help="what else ran there"
    )
    live.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args(arguments)
    if asked.live:
        return run_live(asked)
    kv_bytes = shape_of(LLAMA_8B).kv_bytes(1, 2)
    setup = FleetSetup(cost=gpu_cost(), read_token_s=kv_bytes / (1e9 * asked.gb_per_s))
    for shape in [CONVERSATION] if asked.trace is not None else [CONVERSATION, DOCUMENTS]:
        traces = traces_of(asked, shape)
        print(f"{shape.name if asked.trace is None else asked.trace}, x{asked.speed:g}:")
        print(f"  {'TTFT':>6} {'TPOT':>8}  " + "  ".join(f"{each.name:>18}" for each in LAYOUTS))
        load: PoolLoad | None = None
        alike: dict[str, list[list[RequestFate]]] = {}
        for ttft_s in TTFTS_S:
            runs = {}
            for layout in LAYOUTS:
                if layout.name not in alike:
                    found = [layout.run(each, setup, ttft_s) for each in traces]
                    if not layout.num_prefill:  # what is promised changes nothing there
                        alike[layout.name] = found
                runs[layout.name] = alike.get(layout.name, found)
            load = load or load_of(runs[LAYOUTS[0].name][0], setup)
            print_winners(ttft_s, runs, load)
    return 0


def print_winners(ttft_s: float, runs: dict[str, list[list[RequestFate]]], load: PoolLoad) -> None:
    """Print, for an objective of first tokens and each of the others, the share of good requests in
    each layout, as the mean of all seeds, which serves more of them, and what is planned."""
    moved = [fmean(fate.moves for fates in found for fate in fates) for found in runs.values()]
    print(f"  {ttft_s:4g} s    moved  " + "  ".join(f"{share:18.1%}" for share in moved))
    for tpot_s in TPOTS_S:
        shares = {
            name: fmean(good_share(fates, ttft_s, tpot_s) for fates in found)
            for name, found in runs.items()
        }
        best = max(shares.values())
        most = [name for name, share in shares.items() if share > best - CLEAR]
        said = "  ".join(f"{share:18.3f}" for share in shares.values())
        winner = "alike" if len(most) == len(shares) else " / ".join(most)
        print(f"  {ttft_s:4g} s {1000 * tpot_s:5g} ms  {said}  {winner}", end="")
        print(f"  (planned: {planned(load, Slo(ttft_s=ttft_s, tpot_s=tpot_s))})", flush=True)

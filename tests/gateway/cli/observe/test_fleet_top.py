"""`tollgate fleet top` shows replicas with rates between two looks."""

from __future__ import annotations

import json

from gateway.cli.observe.fleet_top import COLUMNS, FleetLook, rows_of, summary_of
from gateway.cli.shared.tables import lay_out
from tests.gateway.cli.observe.test_fleet import AWAY, replica
from tests.gateway.cli.shared.fake_gateway import serving

FLEET = "/v1/admin/fleet"
TOKENS = {"pool": 100, "host": 10, "disk": 20, "fetched": 10, "computed": 60}
LATER = replica("penny/0", prompt_tokens=TOKENS, generated_tokens=560)
WIDTHS = (60, 80, 120)


def test_rates_are_of_the_interval() -> None:
    first, other = replica("penny/0"), replica("penny/2")
    anew = replica("penny/2", engine_id="another", generated_tokens=9000)
    there, away, started = rows_of(
        FleetLook(10, [first, AWAY, other]), FleetLook(12, [LATER, AWAY, anew])
    )
    assert (there["hit_rate"], there["input_s"], there["output_s"]) == (0.6, 50, 30)
    for each in (away, started):
        assert (each["hit_rate"], each["input_s"], each["output_s"]) == (None, None, None)
    [idle] = rows_of(FleetLook(10, [first]), FleetLook(11, [first]))
    assert (idle["hit_rate"], idle["input_s"], idle["output_s"]) == (None, 0, 0)
    assert summary_of([there, away]) == "1 of 2 replicas serve, 3 run, 0 wait, 30 tokens/s"
    assert summary_of([]) == "No model is served."


def test_it_fits_narrow_terminals() -> None:
    rows = rows_of(FleetLook(0, [replica("penny/0"), AWAY]), FleetLook(1, [LATER, AWAY]))
    for width in WIDTHS:
        table, left_out = lay_out(rows, COLUMNS, width)
        assert max(map(len, table.lines())) <= width, width
        assert bool(left_out) == (width == min(WIDTHS))


def test_off_a_terminal_it_measures_once() -> None:
    with serving() as gateway:
        pages = [{"data": [each, AWAY], "has_more": False} for each in (replica("penny/0"), LATER)]
        gateway.on("GET", FLEET, *pages)
        done = gateway.run("fleet", "top", "--interval", "0.2")
        assert done.exit_code == 0, done.output
        head, first, second = done.output.splitlines()
        assert head.split()[:5] == "REPLICA STATE RUN WAIT I/A/B".split()
        assert first.split()[:6] == ["penny/0", "serving", "3", "0/1/2", "25%", "60%"]
        assert second.split()[:4] == ["penny/1", "unreachable", "0", "-"]
        done = gateway.run("fleet", "top", "--once", "--interval", "0.2", "--json")
        assert json.loads(done.output.splitlines()[0])["output_s"] == 0

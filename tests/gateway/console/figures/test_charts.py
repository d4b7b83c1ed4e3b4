"""The charts in a browser: the objective is drawn, dragging chooses the time, the legend tells what
is under the cursor and takes a series out."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.sync_api import expect

from tests.gateway.console.conftest import Visit

COUNT_OF = """(canvas, name) => {
  const { width, height } = canvas;
  const copy = Object.assign(document.createElement("canvas"), { width, height: height + 1 });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  context.fillRect(0, height, 1, 1);
  const wanted = context.getImageData(0, height, 1, 1).data.join();
  const found = context.getImageData(0, 0, width, height).data;
  let count = 0;
  for (let at = 0; at < found.length; at += 4) {
    if (found.subarray(at, at + 4).join() === wanted) count += 1;
  }
  return count;
}"""


def panel_of(tab: Any, title: str) -> Any:
    heading = tab.get_by_role("heading", name=title, exact=True)
    return tab.locator("section.panel").filter(has=heading)


def drawn(panel: Any, colour: str) -> int:
    """Return how much of a panel's chart has a colour of the stylesheet, in pixels."""
    return int(panel.locator("canvas").evaluate(COUNT_OF, colour))


def test_the_objective_is_a_band_with_its_value(visit: Visit) -> None:
    tab = visit("much", "reader", "/console/overview")
    for title, slo in (("Time to first token", "450"), ("Between tokens", "40")):
        panel = panel_of(tab, title)
        assert panel.locator("figure").get_attribute("data-slo") == f"{slo}.0"
        assert f"SLO {slo}" in panel.locator(".key.slo").inner_text()
        assert drawn(panel, "--good-soft") > 1000, title
    goodput = panel_of(tab, "Goodput")
    assert goodput.locator(".key.slo").inner_text() == "target 99\u00a0%"
    assert drawn(goodput, "--good") > 100
    agentic = visit("much", "reader", "/console/overview?lane=agentic")
    assert "SLO 6,000" in panel_of(agentic, "Time to first token").inner_text()


def test_a_chart_of_nothing_claims_nothing(visit: Visit) -> None:
    """No objective is met where nobody asked."""
    tab = visit("little", "owner", "/console/overview?from=2020-01-01&to=2020-01-02")
    for title in ("Tokens", "Time to first token", "Goodput"):
        panel = panel_of(tab, title)
        expect(panel.locator(".u-over")).to_be_visible()
        assert drawn(panel, "--good-soft") == 0, title


def test_dragging_over_a_chart_chooses_its_time(visit: Visit) -> None:
    tab = visit("much", "reader", "/console/overview?range=7d&model=penny")
    figure = panel_of(tab, "Tokens").locator("figure")
    begin, end = (float(figure.get_attribute(f"data-{name}")) for name in ("from", "to"))
    cells = figure.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => row.cells[0].dataset.v)"
    )
    *_, before, last = sorted(map(float, cells))
    end = max(end, 2 * last - before)  # the last bar is drawn whole, though its time is not over
    expect(figure.locator(".u-over")).to_be_visible()
    place = figure.locator(".u-over").bounding_box()
    height = place["y"] + place["height"] / 2
    tab.mouse.move(place["x"] + place["width"] / 4, height)
    tab.mouse.down()
    tab.mouse.move(place["x"] + place["width"] / 2, height, steps=5)
    tab.mouse.up()
    tab.wait_for_url("**from=*")
    asked = parse_qs(urlsplit(tab.url).query)
    assert asked.keys() == {"from", "to", "model"}, "what else was chosen stays"
    length = end - begin
    assert abs(float(asked["from"][0]) - begin - length / 4) < length / 20
    assert abs(float(asked["to"][0]) - begin - length / 2) < length / 20
    expect(tab.get_by_label("Time range").locator("option:checked")).to_contain_text(" to ")
    tab.go_back()
    expect(tab.get_by_label("Time range")).to_have_value("7d")


def test_the_legend_tells_and_takes_out(visit: Visit) -> None:
    tab = visit("much", "reader", "/console/overview")
    panel = panel_of(tab, "Tokens")
    key = panel.get_by_role("button", name="output")
    total = key.inner_text()
    rows = panel.locator("tbody tr")
    number = rows.count()
    expect(panel.locator(".u-over")).to_be_visible()
    place = panel.locator(".u-over").bounding_box()
    tab.mouse.move(place["x"] + place["width"] * 0.5, place["y"] + place["height"] / 2)
    expect(key).not_to_have_text(total)
    shown = key.inner_text().removeprefix("output").strip()
    near = range(number // 2 - 2, number // 2 + 3)
    values = [float(rows.nth(at).locator("td").nth(4).get_attribute("data-v")) for at in near]
    assert shown in [short(each) for each in values], values
    tab.mouse.move(0, 0)
    expect(key).to_have_text(total)
    before = drawn(panel, "--output"), drawn(panel, "--uncached")
    panel.get_by_role("button", name="uncached").click()
    tab.mouse.move(0, 0)
    left = drawn(panel, "--output"), drawn(panel, "--uncached")
    assert before[1] > 0 == left[1] and left[0] > 0
    panel.get_by_role("button", name="uncached").click()
    tab.mouse.move(0, 0)
    assert (drawn(panel, "--output"), drawn(panel, "--uncached")) == before


def short(number: float) -> str:
    """Write a number as the charts do."""
    for scale, letter in ((1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{float(f'{number / scale:.3g}'):g}{letter}"
    return f"{number:g}"

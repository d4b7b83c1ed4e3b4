// Draws a chart from the table behind it: uPlot over <figure class="chart"><div class="plot"></div><table data-chart>…
"use strict";

const synced = uPlot.sync("range");
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const COLOURS = { p50: "uncached", p99: "output", uncached: "uncached", cached: "cached", written: "written", output: "output" };
const seriesColour = (name) => colourOf(COLOURS[name] || name) || colourOf("accent");

const short = (value) => {
  if (value == null) return "–";
  for (const [scale, letter] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
    if (Math.abs(value) >= scale) return `${+(value / scale).toPrecision(3)}${letter}`;
  }
  return `${+value.toPrecision(3)}`;
};
const UNITS = {
  count: short,
  usd: (pico) => (pico == null ? "–" : `$ ${+(pico / 1e12).toPrecision(4)}`),
  ms: (value) => (value == null ? "–" : value >= 10000 ? `${(value / 1000).toFixed(1)} s` : `${+value.toPrecision(3)} ms`),
  percent: (value) => (value == null ? "–" : `${+(value * 100).toPrecision(3)} %`),
  bytes: (value) => (value == null ? "–" : `${short(value)}B`),
};

function read(table) {
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...table.tBodies[0].rows].map((row) =>
    [...row.cells].map((cell) => (cell.dataset.v === "" || cell.dataset.v === undefined ? null : Number(cell.dataset.v))));
  rows.sort((one, other) => one[0] - other[0]);
  const wanted = heads.map((_, at) => at).filter((at) => at > 0 && heads[at].dataset.series).slice(0, 5);
  return {
    times: rows.map((row) => row[0]),
    series: wanted.map((at) => ({ title: heads[at].textContent, name: heads[at].dataset.series, values: rows.map((row) => row[at]) })),
  };
}

function labels(zone, from, to) {
  const part = (options) => new Intl.DateTimeFormat("en-GB", { timeZone: zone, ...options });
  const time = part({ hour: "2-digit", minute: "2-digit" });
  const day = part({ day: "numeric", month: "short" });
  const today = day.format(Date.now());
  const yesterday = day.format(Date.now() - 86400000);
  const named = (date) => {
    const found = day.format(date);
    return found === today ? "today" : found === yesterday ? "yesterday" : found;
  };
  const byDays = to - from > 2 * 86400;
  return (_, splits) => splits.map((at, place) => {
    const date = at * 1000;
    if (byDays) return day.format(date);
    const isNewDay = place === 0 || day.format(splits[place - 1] * 1000) !== day.format(date);
    return isNewDay ? `${named(date)} ${time.format(date)}` : time.format(date);
  });
}

function stacked(series) {
  const sums = series[0] ? series[0].values.map(() => 0) : [];
  return series.map((each) => each.values.map((value, at) => {
    if (value == null) return null;
    sums[at] += value;
    return sums[at];
  }));
}

function draw(figure) {
  const plot = figure.querySelector(".plot");
  const { times, series } = read(figure.querySelector("table"));
  plot.replaceChildren();
  if (!times.length || !series.length) return null;
  const zone = figure.dataset.zone || "UTC";
  const from = Number(figure.dataset.from) || times[0];
  const to = Number(figure.dataset.to) || times[times.length - 1];
  const bars = figure.dataset.kind === "bars";
  const show = UNITS[figure.dataset.unit] || short;
  const heights = bars ? stacked(series) : series.map((each) => each.values);
  // What is drawn last lies above: of a stack, the lowest part.
  const order = series.map((_, at) => at);
  if (bars) order.reverse();
  const axis = { stroke: colourOf("ink-3"), grid: { stroke: colourOf("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const step = times.length > 1 ? Math.min(...times.slice(1).map((at, place) => at - times[place]).filter((gap) => gap > 0)) : 3600;
  const options = {
    width: plot.clientWidth || 600,
    height: 216,
    tzDate: (at) => uPlot.tzDate(new Date(at * 1000), zone),
    padding: [8, 12, 0, 0],
    legend: { show: true, live: true },
    cursor: { sync: { key: synced.key, setSeries: false }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: true, range: [from, Math.max(to, times[times.length - 1] + (bars ? step : 0))] }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, values: labels(zone, from, to), space: 110, size: 32 },
      { ...axis, values: (_, splits) => splits.map(show), size: 64 },
    ],
    series: [
      { label: "When", value: (_, at) => (at == null ? "" : uPlot.fmtDate("{YYYY}-{MM}-{DD} {HH}:{mm}")(uPlot.tzDate(new Date(at * 1000), zone))) },
      ...order.map((at) => ({
        label: series[at].title,
        stroke: seriesColour(series[at].name),
        fill: bars ? seriesColour(series[at].name) : undefined,
        width: bars ? 0 : series[at].name === "p99" ? 1 : 2,
        points: { show: !bars && series[at].values.some((value, place, all) => value != null && all[place - 1] == null && all[place + 1] == null) },
        paths: bars ? uPlot.paths.bars({ size: [0.86, 64], align: 1 }) : uPlot.paths.linear(),
        value: (_, __, ___, place) => show(place == null ? null : series[at].values[place]),
        spanGaps: false,
      })),
    ],
    hooks: {
      setSelect: [(chart) => {
        if (chart.select.width < 8) return;
        const begin = Math.floor(chart.posToVal(chart.select.left, "x"));
        const end = Math.ceil(chart.posToVal(chart.select.left + chart.select.width, "x"));
        const address = new URL(location.href);
        address.searchParams.delete("range");
        address.searchParams.delete("after");
        address.searchParams.set("from", begin);
        address.searchParams.set("to", end);
        location.assign(address);
      }],
    },
  };
  const made = new uPlot(options, [times, ...order.map((at) => heights[at])], plot);
  // Names and figures of the legend stand in the table, too.
  made.root.setAttribute("aria-hidden", "true");
  return made;
}

const drawn = new Map();
const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const chart = drawn.get(target);
    if (chart && contentRect.width && Math.abs(chart.width - contentRect.width) > 1) {
      chart.setSize({ width: contentRect.width, height: chart.height });
    }
  }
});

function drawAll() {
  for (const [plot, chart] of drawn) {
    chart.destroy();
    sizes.unobserve(plot);
  }
  drawn.clear();
  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = draw(figure);
    if (!chart) continue;
    const plot = figure.querySelector(".plot");
    drawn.set(plot, chart);
    sizes.observe(plot);
  }
}

drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
document.addEventListener("htmx:afterSwap", drawAll);

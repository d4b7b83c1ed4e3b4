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

const RIGHT = 26;

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
  const words = (splits, at, place) => {
    const date = at * 1000;
    if (byDays) return day.format(date);
    const isNewDay = place === 0 || day.format(splits[place - 1] * 1000) !== day.format(date);
    return isNewDay ? `${named(date)} ${time.format(date)}` : time.format(date);
  };
  return (chart, splits) => splits.map((at, place) => {
    const text = words(splits, at, place);
    // Of a day that begins at the edge the time alone has room.
    const room = chart.bbox.width / (devicePixelRatio || 1) + RIGHT - chart.valToPos(at, "x");
    return room < text.length * 3.5 && text.length > 6 && !byDays ? time.format(at * 1000) : text;
  });
}

// Heights of a stack; what is not `shown` takes no place in it.
function stacked(series, shown = series.map(() => true)) {
  const sums = series[0] ? series[0].values.map(() => 0) : [];
  return series.map((each, place) => each.values.map((value, at) => {
    if (value == null) return null;
    if (shown[place]) sums[at] += value;
    return sums[at];
  }));
}

// The range of the values' axis. A rate near its whole shows its upper end alone; an objective far above what was
// measured is not drawn to scale, or nobody would see what was.
function rangeOf(unit, bars, slo) {
  const ofRates = unit === "percent" && !bars;
  return (_, low, high) => {
    if (ofRates) {
      const lowest = Math.min(low ?? 1, slo ?? 1, 0.98);
      return [Math.max(0, lowest - (1 - lowest) * 0.25), 1 + (1 - lowest) * 0.05];
    }
    const top = slo && slo < 3 * (high || 0) ? Math.max(high, slo) : high;
    return [0, top > 0 ? top * 1.12 : 1];
  };
}

// The objective: a band of what meets it, and a line with its value.
function objective(figure, show) {
  const slo = Number(figure.dataset.slo);
  if (!slo) return {};
  const above = figure.dataset.met === "above";
  return {
    drawClear: [(chart) => {
      const { left, top, width, height } = chart.bbox;
      const at = Math.max(top, Math.min(top + height, chart.valToPos(slo, "y", true)));
      chart.ctx.fillStyle = colourOf("good-soft");
      chart.ctx.fillRect(left, above ? top : at, width, above ? at - top : top + height - at);
    }],
    draw: [(chart) => {
      const { ctx, bbox: { left, top, width } } = chart;
      const at = chart.valToPos(slo, "y", true);
      const ratio = devicePixelRatio || 1;
      const isInside = at >= top;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = colourOf("good");
      ctx.lineWidth = ratio;
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      if (isInside) {
        ctx.beginPath();
        ctx.moveTo(left, at);
        ctx.lineTo(left + width, at);
        ctx.stroke();
      }
      ctx.font = `${12 * ratio}px system-ui`;
      ctx.textAlign = "right";
      const below = above || at - top < 16 * ratio;
      ctx.textBaseline = below ? "top" : "bottom";
      const words = isInside ? `SLO ${show(slo)}` : `all below the SLO of ${show(slo)}`;
      ctx.fillText(words, left + width - 4 * ratio, isInside ? at + (below ? 3 : -2) * ratio : top + 3 * ratio);
      ctx.restore();
    }],
  };
}

// Says in the middle of a plot that there is nothing to be drawn: an objective would be met by nobody.
function emptiness() {
  return {
    draw: [({ ctx, bbox: { left, top, width, height } }) => {
      ctx.save();
      ctx.fillStyle = colourOf("ink-3");
      ctx.font = `${12 * (devicePixelRatio || 1)}px system-ui`;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillText("nothing in this time", left + width / 2, top + height / 2);
      ctx.restore();
    }],
  };
}

// What was changed, as hairlines over the plot that the list behind it names: each leads to its entry of the audit log, and
// shows its name under the cursor or the focus. Those that are near each other are one.
function hairlines(figure, from) {
  figure.querySelector(".hairlines")?.remove();
  const listed = [...figure.querySelectorAll(".changes li[data-at]")];
  if (!listed.length) return () => {};
  const box = Object.assign(document.createElement("div"), { className: "hairlines" });
  figure.querySelector(".plot").after(box);
  return (chart) => {
    const { left, top, width, height } = chart.over.getBoundingClientRect();
    const outer = figure.getBoundingClientRect();
    const lines = [];
    for (const item of listed) {
      const at = Math.max(from, Number(item.dataset.at));
      const place = Math.round(chart.valToPos(at, "x"));
      if (place < 0 || place > width) continue;
      const near = lines.find((line) => Math.abs(line.place - place) < 24);
      if (near) near.items.push(item);
      else lines.push({ place, items: [item] });
    }
    box.replaceChildren(...lines.map(({ place, items }) => {
      const names = items.map((item) => item.textContent.trim().replace(/\s+/g, " "));
      const line = Object.assign(document.createElement("a"), { href: items[0].querySelector("a").href });
      line.setAttribute("aria-label", names.join(", "));
      line.style.left = `${left - outer.left + place}px`;
      line.style.top = `${top - outer.top}px`;
      line.style.height = `${height}px`;
      const told = document.createElement("span");
      told.append(...names.flatMap((name) => [name, document.createElement("br")]));
      line.append(told);
      if (place > width / 2) line.className = "to-left";
      return line;
    }));
  };
}

// The names of the series, at the head of the panel: each with its sum, or, under the cursor, with its value there; a click
// takes a series out. Without this file they are a plain legend.
function legend(figure, series, show, whenOf) {
  const head = figure.closest(".panel")?.querySelector(".legend");
  if (!head) return { tell() {}, onToggle() {} };
  let when = head.querySelector(".when");
  if (!when) head.prepend(when = Object.assign(document.createElement("span"), { className: "when" }));
  const keys = series.map((each) => {
    const found = head.querySelector(`[data-key-of="${CSS.escape(each.name)}"]`);
    if (!found || found.tagName === "BUTTON") return found;
    const made = Object.assign(document.createElement("button"), { type: "button", className: found.className, innerHTML: found.innerHTML });
    made.dataset.keyOf = each.name;
    if (!made.querySelector("b")) made.append(" ", document.createElement("b"));
    made.dataset.total = made.querySelector("b").textContent;
    made.setAttribute("aria-pressed", "true");
    found.replaceWith(made);
    return made;
  });
  return {
    tell(at) {
      when.textContent = at == null ? "" : whenOf(at);
      keys.forEach((key, place) => {
        if (key) key.querySelector("b").textContent = at == null ? key.dataset.total : show(series[place].values[at]);
      });
    },
    onToggle(toggle) {
      keys.forEach((key, place) => {
        if (!key) return;
        toggle(place, key.getAttribute("aria-pressed") === "true");
        key.onclick = () => {
          const shown = key.getAttribute("aria-pressed") !== "true";
          key.setAttribute("aria-pressed", String(shown));
          toggle(place, shown);
        };
      });
    },
  };
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
  const moment = new Intl.DateTimeFormat("en-GB", { timeZone: zone, day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  const isEmpty = series.every((each) => each.values.every((value) => (bars ? !value : value == null)));
  const goal = isEmpty ? emptiness() : objective(figure, show);
  const place = hairlines(figure, from);
  const names = legend(figure, series, show, (at) => moment.format(times[at] * 1000));
  const options = {
    width: plot.clientWidth || 600,
    height: 216,
    tzDate: (at) => uPlot.tzDate(new Date(at * 1000), zone),
    padding: [8, RIGHT, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: synced.key, setSeries: false }, drag: { x: true, y: false, setScale: false } },
    scales: { x: { time: true, range: [from, Math.max(to, times[times.length - 1] + (bars ? step : 0))] }, y: { range: rangeOf(figure.dataset.unit, bars, Number(figure.dataset.slo) || null) } },
    axes: [
      { ...axis, values: labels(zone, from, to), space: plot.clientWidth < 500 ? 68 : 110, size: 26 },
      { ...axis, values: (_, splits) => splits.map((at) => (isEmpty ? "" : show(at))), size: 64 },
    ],
    series: [
      {},
      ...order.map((at) => ({
        label: series[at].title,
        stroke: seriesColour(series[at].name),
        fill: bars ? seriesColour(series[at].name) : undefined,
        width: bars ? 0 : series[at].name === "p99" ? 1 : 2,
        points: { show: !bars && series[at].values.some((value, place, all) => value != null && all[place - 1] == null && all[place + 1] == null) },
        paths: bars ? uPlot.paths.bars({ size: [0.86, 64], align: 1 }) : uPlot.paths.linear(),
        spanGaps: false,
      })),
    ],
    hooks: {
      ...goal,
      draw: [...(goal.draw ?? []), place],
      setCursor: [(chart) => names.tell(chart.cursor.idx)],
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
  const shown = series.map(() => true);
  names.onToggle((place, isShown) => {
    if (shown[place] === isShown) return;
    shown[place] = isShown;
    made.setSeries(order.indexOf(place) + 1, { show: isShown });
    if (!bars) return;
    const again = stacked(series, shown);
    made.setData([times, ...order.map((at) => again[at])]);
  });
  // What is drawn stands in the table, too.
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
// What renews itself elsewhere on the page leaves the charts as they are.
document.addEventListener("htmx:afterSwap", () => {
  const plots = [...document.querySelectorAll("figure.chart .plot")];
  if (plots.some((plot) => !plot.firstChild) || [...drawn.keys()].some((plot) => !plot.isConnected)) drawAll();
});

// Per device: who holds the memory now, and over time, each change marked with its reason.
import { bytes, clock, html, now, span, Table, Tag, Ticket, useEffect, useRef, useState, useStore, useTick } from "./ui.js";

const COLOURS = ["#4477aa", "#228833", "#aa3377", "#44a5c2", "#b58900", "#7b61c9", "#009988", "#c2577a", "#5f8a2c", "#2f6fb3"];
const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const given = new Map();

export function colour(kind, label) {
  if (kind === "foreign") return "#8a8f98";
  if (kind === "coming_back") return "#e0a030";
  if (!given.has(label)) given.set(label, COLOURS[given.size % COLOURS.length]);
  return given.get(label);
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const LEVEL = { foreign: 0, granted: 1, coming_back: 2 };

// Points of one device within the window, each held until the next; null where no tab looked.
function pointsOf(samples, device, from) {
  const all = samples.filter((sample) => sample.devices[device]);
  const first = Math.max(0, all.findLastIndex((sample) => sample.unix_s <= from));
  const points = [];
  for (const { unix_s, is_first, devices } of all.slice(first)) {
    if (is_first && points.length) points.push({ at: unix_s - 0.001, row: null });
    points.push({ at: Math.max(unix_s, from), row: devices[device] });
  }
  if (points.length) points.push({ at: now(), row: points.at(-1).row });
  return points;
}

// Cumulated from below: foreign, then models as they came, then what comes back.
function stack(points) {
  const names = new Set();
  for (const { row } of points) for (const name in row?.parts) if (!name.startsWith("free")) names.add(name);
  const level = (name) => LEVEL[name.split("/")[0]];
  const order = [...names].sort((a, b) => level(a) - level(b));
  const sums = points.map(() => 0);
  const layers = order.map((name) => points.map(({ row }, i) => (row ? (sums[i] += row.parts[name]?.[0] || 0) : null)));
  return { order, layers };
}

function marksOf(store, device, from, order) {
  const labels = new Set(order.map((name) => name.slice(name.indexOf("/") + 1)));
  return store.events.filter((event) => event.mark && event.unix_s >= from
    && (event.device ? event.device === device : !event.model || labels.has(event.model)));
}

function drawMarks(plot, marks) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  let free = -Infinity;
  for (const { unix_s, mark, kind } of marks) {
    const x = Math.round(plot.valToPos(unix_s, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = ctx.fillStyle = kind === "eviction" || kind === "load_failed" ? css("--bad") : css("--ink");
    ctx.globalAlpha = 0.55;
    ctx.setLineDash([2 * ratio, 3 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    if (x < free) continue;
    free = x + 13 * ratio;
    ctx.translate(x + 10 * ratio, bbox.top + 4 * ratio);
    ctx.rotate(Math.PI / 2);
    const room = bbox.height - 8 * ratio;
    const wide = ctx.measureText(mark).width;
    ctx.globalAlpha = 0.75;
    ctx.fillStyle = css("--card");
    ctx.fillRect(-2 * ratio, -2 * ratio, Math.min(wide, room) + 4 * ratio, 12 * ratio);
    ctx.globalAlpha = 1;
    ctx.fillStyle = css("--ink");
    ctx.fillText(mark, 0, 8 * ratio, room);
    ctx.setTransform(1, 0, 0, 1, 0, 0);
  }
  ctx.restore();
}

function options(width, order, live) {
  const line = { points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) };
  const grid = { stroke: css("--line"), width: 1 };
  const layers = order.map((name) => {
    const [kind, label] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
    return { ...line, stroke: css("--card"), width: 1, fill: colour(kind, label) };
  });
  return {
    width, height: innerWidth < 600 ? 180 : 240, legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { y: { range: (_, __, most) => [0, most * 1.06 || 1] } },
    axes: [
      { stroke: css("--muted"), grid, ticks: grid, values: (_, marks) => marks.map((at) => (innerWidth < 600 ? clock(at).slice(0, 5) : clock(at))), space: 90 },
      { stroke: css("--muted"), grid, ticks: grid, size: 72, values: (_, sizes) => sizes.map((size) => (size ? bytes(size) : "0")) },
    ],
    series: [{}, ...layers.reverse(),
      { ...line, stroke: css("--ink"), width: 1.5, dash: [2, 3] },
      { ...line, stroke: css("--bad"), width: 1.5, dash: [8, 4] }],
    hooks: {
      draw: [(plot) => drawMarks(plot, live.marks)],
      setCursor: [(plot) => live.hover(plot.cursor.idx)],
    },
  };
}

function Chart({ device, seconds }) {
  const store = useStore(), box = useRef(), live = useRef({ marks: [] }).current;
  const [at, hover] = useState(null);
  useTick();
  const from = now() - seconds;
  const points = pointsOf(store.samples, device, from);
  const { order, layers } = stack(points);
  live.points = points;
  live.marks = marksOf(store, device, from, order);
  live.hover = (index) => hover(index == null ? null : index);
  useEffect(() => {
    const width = box.current.clientWidth, look = `${order}|${width}|${css("--ink")}`;
    if (live.look !== look) {
      live.plot?.destroy();
      box.current.replaceChildren();
      live.plot = new uPlot(options(width, order, live), null, box.current);
      live.look = look;
    }
    const value = (name) => points.map(({ row }) => row && row[name]);
    live.plot.setData([points.map((p) => p.at), ...layers.reverse(), value("measured"), value("budget")], false);
    live.plot.setScale("x", { min: from, max: now() });
  });
  useEffect(() => () => live.plot?.destroy(), []);
  return html`<div class="chart" ref=${box} role="img" aria-label=${`${device} over the last ${span(seconds)}; the table below says what it holds now`}></div>
    <${Readout} point=${points[at]} marks=${live.marks} />`;
}

function Readout({ point, marks }) {
  if (!point?.row) return html`<p class="readout muted">Point at the picture: bytes and tickets of that moment.
    Dotted: measured. Dashed: the budget.</p>`;
  const near = marks.filter((mark) => Math.abs(mark.unix_s - point.at) < 1.5);
  return html`<p class="readout"><b>${clock(point.at)}</b>${Object.entries(point.row.parts).map(([name, [size, ticket]]) => {
    const [kind, label] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
    return html` <span class="item"><${Swatch} kind=${kind} label=${label} />${label || "free"} ${bytes(size)}
      ${kind === "coming_back" ? " coming back" : ""}${ticket && html` <code>${ticket}</code>`}</span>`;
  })} <span class="item">measured ${bytes(point.row.measured)}</span>${near.map((mark) => html` <em>${mark.mark}</em>`)}</p>`;
}

const Swatch = ({ kind, label }) => html`<i class=${`swatch ${kind}`} style=${kind === "free" ? {} : { background: colour(kind, label) }}></i>`;

function Device({ row, seconds }) {
  const total = Math.max(row.budget_bytes, row.parts.reduce((sum, part) => sum + part.size_bytes, 0)) || 1;
  const back = row.parts.filter((part) => part.kind === "coming_back").reduce((sum, part) => sum + part.size_bytes, 0);
  const facts = [["granted", row.charged_bytes - back], ["measured", row.measured_bytes], ["foreign", row.foreign_bytes],
    ["coming back", back], ["free", row.free_bytes], ["largest fit", row.largest_fit_bytes], ["budget", row.budget_bytes]];
  return html`<section class="card" aria-label=${row.device}>
    <header><h2>${row.device} <small>${row.name}</small></h2>
      ${row.pressure !== "nominal" && html`<${Tag} of=${`pressure ${row.pressure}`} tone="bad" />`}
      ${!row.is_exact && html`<${Tag} of="inexact" tone="muted" />`}</header>
    <dl class="facts">${facts.map(([name, size]) => html`<div><dt>${name}</dt><dd>${bytes(size)}</dd></div>`)}</dl>
    <div class="bar" aria-hidden="true">${row.parts.map((part) => html`<i class=${part.kind} title=${`${part.label || "free"} ${bytes(part.size_bytes)} ${part.ticket}`}
      style=${{ width: `${(100 * part.size_bytes) / total}%`, ...(part.kind === "free" ? {} : { background: colour(part.kind, part.label) }) }}></i>`)}</div>
    <${Chart} device=${row.device} seconds=${seconds} />
    <${Table} label=${`Parts of ${row.device}`} rows=${row.parts} keyOf=${(p) => p.kind + p.ticket + p.label} empty="" heads=${[
      ["part", (p) => html`<${Swatch} kind=${p.kind} label=${p.label} />${p.label || "free"}`],
      ["is", (p) => html`<${Tag} of=${p.kind === "granted" ? p.state : p.kind} />`],
      ["bytes", (p) => bytes(p.size_bytes), 1], ["measured", (p) => bytes(p.measured_bytes), 1],
      ["ticket", (p) => p.ticket && html`<${Ticket} id=${p.ticket} />`]]} /></section>`;
}

export function Memory() {
  const { view } = useStore(), [seconds, choose] = useState(300);
  return html`<div class="tools" role="group" aria-label="Window of time">${WINDOWS.map(([s, name]) => html`
      <button class="small" aria-pressed=${s === seconds} onClick=${() => choose(s)}>${name}</button>`)}</div>
    ${view.devices.map((row) => html`<${Device} key=${row.device} row=${row} seconds=${seconds} />`)}
    ${!view.devices.length && html`<p class="none">No node agent has introduced a device yet.</p>`}`;
}

// Per device: who holds the memory now, and over time, each change marked with its reason.
import { bytes, clock, html, now, marked, size, span, table, ticket, useEffect, useRef, useState, useStore } from "./ui.js";

const COLOURS = ["#47a", "#283", "#a37", "#4ac", "#b80", "#75c", "#098", "#c57", "#582", "#26b"];
const OWN = { foreign: "#8a8f98", coming_back: "#e0a030", free: "#8883" }, LEVEL = { foreign: 0, granted: 1, coming_back: 2 };
const WINDOWS = { "1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600 };
const given = new Map();

function colour(kind, label) {
	if (OWN[kind]) return OWN[kind];
	if (!given.has(label)) given.set(label, COLOURS[given.size % COLOURS.length]);
	return given.get(label);
}

const css = (name) => getComputedStyle(document.body).getPropertyValue(name);
const split = (name) => name.split(/\/(.*)/);

// Points of one device within the window, each held until the next; null while no tab looked.
function pointsOf(samples, device, from) {
	const all = samples.filter((sample) => sample.devices[device]), points = [];
	for (const { unix_s, is_first, devices } of all.slice(Math.max(0, all.findLastIndex((sample) => sample.unix_s <= from)))) {
		if (is_first && points.length) points.push({ at: unix_s - 0.001 });
		points.push({ at: Math.max(unix_s, from), row: devices[device] });
	}
	if (points.length) points.push({ at: now(), row: points.at(-1).row });
	return points;
}

// Cumulated from below: foreign, then models as they came, then what comes back.
function stack(points) {
	const names = new Set(points.flatMap(({ row }) => Object.keys(row?.parts || {})));
	names.delete("free/");
	const order = [...names].sort((a, b) => LEVEL[split(a)[0]] - LEVEL[split(b)[0]]), sums = points.map(() => 0);
	return { order, layers: order.map((name) => points.map(({ row }, i) => (row ? (sums[i] += row.parts[name]?.[0] || 0) : null))) };
}

function drawMarks({ ctx, bbox, valToPos }, marks) {
	const unit = devicePixelRatio, room = bbox.height - 8 * unit;
	let free = 0;
	ctx.save();
	ctx.font = `${10 * unit}px system-ui`;
	ctx.textAlign = "left";
	ctx.textBaseline = "middle";
	for (const { unix_s, mark, tone } of marks) {
		const x = valToPos(unix_s, "x", true);
		if (x < bbox.left) continue;
		ctx.fillStyle = tone === "bad" ? css("--bad") : css("--ink");
		ctx.fillRect(x, bbox.top, unit, bbox.height);
		if (x < free) continue;
		free = x + 14 * unit;
		ctx.save();
		ctx.translate(x + 8 * unit, bbox.top + 4 * unit);
		ctx.rotate(Math.PI / 2);
		ctx.fillStyle = css("--card");
		ctx.globalAlpha = 0.8;
		ctx.fillRect(-2 * unit, -6 * unit, Math.min(room, ctx.measureText(mark).width) + 4 * unit, 12 * unit);
		ctx.globalAlpha = 1;
		ctx.fillStyle = css("--ink");
		ctx.fillText(mark, 0, 0, room);
		ctx.restore();
	}
	ctx.restore();
}

function options(width, order, live) {
	const line = { points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }), stroke: css("--ink") };
	const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false } };
	return {
		width, height: 220, legend: { show: false }, cursor: { y: false, drag: { x: false } },
		scales: { y: { range: (_, __, most) => [0, most * 1.06 || 1] } },
		axes: [{ ...axis, size: 32, space: 80, values: (_, at) => at.map(clock) },
			{ ...axis, size: 72, incrs: [...Array(24).keys()].map((n) => 2 ** (n + 20)), values: (_, sizes) => sizes.map(bytes) }],
		series: [{}, ...order.map((name) => ({ ...line, stroke: css("--card"), width: 1, fill: colour(...split(name)) })).reverse(),
			{ ...line, width: 1.5, dash: [2, 3] }, { ...line, stroke: css("--bad"), width: 1.5, dash: [8, 4] }],
		hooks: { draw: [(plot) => drawMarks(plot, live.marks)], setCursor: [(plot) => live.hover(plot.cursor.idx)] },
	};
}

function Chart({ device, seconds }) {
	const { samples, events } = useStore(), box = useRef(), live = useRef({}).current, [at, hover] = useState();
	const from = now() - seconds, points = pointsOf(samples, device, from), { order, layers } = stack(points);
	const labels = order.map((name) => split(name)[1]);
	live.marks = events.filter((event) => event.mark && event.unix_s >= from && (event.device ? event.device === device : !event.model || labels.includes(event.model)));
	live.hover = hover;
	useEffect(() => {
		const width = box.current.clientWidth, look = `${order} ${width} ${css("--ink")}`;
		if (live.look !== look) {
			live.plot?.destroy();
			live.plot = new uPlot(options(width, order, live), null, box.current);
			live.look = look;
		}
		const line = (field) => points.map(({ row }) => row && row[field]);
		live.plot.setData([points.map((point) => point.at), ...layers.reverse(), line("measured"), line("budget")], false);
		live.plot.setScale("x", { min: from, max: now() });
	});
	useEffect(() => () => live.plot.destroy(), []);
	const point = points[at], near = point && live.marks.filter((mark) => Math.abs(mark.unix_s - point.at) < 1.5);
	return html`<div ref=${box} role="img" aria-label=${`${device} over ${span(seconds)}; the table says what it holds now`}></div>
		<p class="readout">${point?.row ? html`<b>${clock(point.at)}</b>${Object.entries(point.row.parts).map(([name, [held, id]]) => {
			const [kind, label] = split(name);
			return html`<span class="item">${swatch(kind, label)}${label} ${kind.replace("_", " ")} ${bytes(held)} <small>${id}</small></span>`;
		})}<span class="item">measured ${bytes(point.row.measured)}</span> <em>${near.map((mark) => mark.mark).join("; ")}</em>`
		: html`<span class="muted">Point at the picture for bytes and tickets of a moment. Dotted: measured. Dashed: the budget.</span>`}</p>`;
}

const swatch = (kind, label) => html`<i class=${`swatch ${kind}`} style=${{ backgroundColor: colour(kind, label) }}></i>`;

function Device({ row, seconds }) {
	const total = row.parts.reduce((sum, part) => sum + part.size_bytes, 0);
	const back = row.parts.reduce((sum, part) => sum + (part.kind === "coming_back" && part.size_bytes), 0);
	const facts = { granted: row.charged_bytes - back, measured: row.measured_bytes, foreign: row.foreign_bytes, "coming back": back,
		free: row.free_bytes, "largest fit": row.largest_fit_bytes, budget: row.budget_bytes };
	return html`<section class="card" aria-label=${row.device}><h2>${row.device} <small>${row.name} ${row.is_exact || "inexact"}</small></h2>
		<dl>${Object.entries(facts).map(([name, held]) => html`<div><dt>${name}</dt><dd>${bytes(held)}</dd></div>`)}</dl>
		<div class="bar" aria-hidden="true">${row.parts.map((part) => html`<i class=${part.kind} title=${`${part.label} ${bytes(part.size_bytes)}`}
			style=${{ width: `${(100 * part.size_bytes) / total}%`, backgroundColor: colour(part.kind, part.label) }}></i>`)}</div>
		<${Chart} device=${row.device} seconds=${seconds} />
		${table(`Parts of ${row.device}`, row.parts, [["part", (p) => [swatch(p.kind, p.label), p.label || "free"]],
			["is", (p) => marked(p.kind === "granted" ? p.state : p.kind)], size("bytes", "size_bytes"), size("measured", "measured_bytes"), ticket])}</section>`;
}

export function Memory() {
	const { view } = useStore(), [seconds, choose] = useState(300);
	return html`<div class="tools" role="group" aria-label="Window of time">${Object.entries(WINDOWS).map(([name, s]) => html`
			<button class="small" aria-pressed=${s === seconds} onClick=${() => choose(s)}>${name}</button>`)}</div>
		${view.devices.map((row) => html`<${Device} key=${row.device} row=${row} seconds=${seconds} />`)}`;
}

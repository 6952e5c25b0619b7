// Models, queue, events, leases and tenants, settings, and the dry run.
import { end, get, post, put } from "./data.js";
import { button, bytes, clock, count, html, left, marked, now, planned, planOf, propose, size, span, table, tag, text, ticket, took, useEffect, useState, useStore } from "./ui.js";

const SHOWN = 60, URGENCY = ["urgent", "high", "normal", "low", "batch"];
const FLOORS = { device: "It is loaded now and stays on the device.", host: "It may sleep, and stays in RAM.", cold: "It may leave." };
const named = encodeURIComponent;
const has = (words, ...parts) => parts.join(" ").toLowerCase().includes(words.toLowerCase());

const load = ({ model }) => propose(`Load ${model}`, () => planOf({ model }), "Load it", async () => (await post(`models/load/${model}`), "It is asked for."));

const unload = (row) => propose(`Unload ${row.model}`, async () => html`<p>${row.tickets.join(", ")} would leave: <b>${bytes(row.charged_bytes)}</b> come back.
		A new load takes ${span(row.load_s)}. ${row.inflight ? `It stays: ${row.inflight} requests are in flight.` : ""}</p>`, "Unload it",
	async () => `Asked to leave: ${(await post(`models/unload/${row.model}`)).tickets.join(", ")}.`);

const floor = ({ model }, to) => propose(`Floor ${to} for ${model}`, async () => html`<p>${FLOORS[to]}</p>${to === "device" && (await planOf({ model }))}`,
	`Set ${to}`, async () => (await put(`residency/${model}`, { floor: to }), `Its floor is ${to}.`));

const drain = (row) => propose(`Drain ${row.name}`, async () => html`<p>${row.tenant} has notice to give ${bytes(row.charged_bytes)} back.</p>`, "Give notice",
	async () => (await post(`leases/${named(row.ticket)}/drain`), "It has its notice."));

const raise = (row, to) => propose(`Raise ${row.model} to ${to}`, () => planOf({ model: row.model, priority: to }), "Raise it",
	async () => (await post(`queue/${named(row.ticket)}/raise`, { priority: to }), `It waits with priority ${to}.`));

const cancel = (id, loses, run) => propose(`Cancel ${id}`, async () => html`<p>${loses}</p>`, "Cancel it", run);

const Search = ({ value, view, label }) => html`<input type="search" id="search" aria-label=${label} placeholder=${`${label} ( / )`} value=${value}
	onInput=${(event) => {
		history.replaceState(null, "", `#${view}?${named(event.target.value)}`);
		dispatchEvent(new Event("hashchange"));
	}} />`;

const model = ["model", (r) => html`<b>${r.model}</b> <small>${r.capability}</small>`];
const MODELS = [model, ["state", (r) => html`${marked(r.state)} ${r.state === "loading" && r.load_s && `${span(now() - r.since_unix_s)} of ${span(r.load_s)} `}
		${r.leaving} ${r.is_open || `closed, ${r.hours}`} <span class="bad">${r.failure}</span>`],
	left("leaves in", "leaves_unix_s"), count("in flight", "inflight"), size("held", "charged_bytes"), size("in RAM", "host_bytes"),
	size("learned", "learned_bytes"), took("load", "load_s"), took("wake", "wake_s"),
	["adapters", (r) => r.adapters && html`<a href=${`#models?${r.model}:`}>${r.adapters.hot} hot, ${r.adapters.warm} warm, ${r.adapters.cold} cold</a>`],
	["", (r) => html`<span class="tools"><select aria-label=${`Floor of ${r.model}`} value=${r.floor} onChange=${(event) => {
			floor(r, event.target.value);
			event.target.value = r.floor;
		}}>${Object.keys(FLOORS).map((to) => html`<option value=${to}>${r.is_pinned ? "pinned" : `floor: ${to}`}</option>`)}</select>
		${r.tickets.length ? button("Unload", r.model, () => unload(r)) : button("Load", r.model, () => load(r))}</span>`]];

export function Models({ search }) {
	const { models } = useStore(), [most, show] = useState(SHOWN), [found, set] = useState({ adapters: [] });
	useEffect(() => {
		const ask = () => document.hidden || get(`view/adapters?search=${named(search)}`).then(set, () => 0);
		const timers = [setTimeout(ask, 200), setInterval(ask, 5000)];
		return () => timers.forEach(clearTimeout);
	}, [search]);
	const rows = [...models.values()].filter((row) => has(search, row.model, row.capability, row.state))
		.sort((a, b) => (a.state === "cold") - (b.state === "cold") || (a.model < b.model ? -1 : 1));
	return html`<${Search} value=${search} view="models" label="Search models and adapters" />
		<p class="muted" role="status">${rows.length} of ${models.size} models</p>
		${table("Models", rows.slice(0, most), MODELS, "No model has this name.", "model")}
		${rows.length > most && html`<button onClick=${() => show(Infinity)}>Show ${rows.length - most} more</button>`}
		${found.count > 0 && html`<section class="card"><h2>Adapters <small>${found.adapters.length} of ${found.count}</small></h2>
			<ul class="names">${found.adapters.map((name) => html`<li>${name} ${found.tiers[name] && marked(found.tiers[name])}</li>`)}</ul></section>`}`;
}

const QUEUE = [model, count("position"), tag("priority"), size("waits for", "need_bytes"), ["waited", (r) => span(now() - r.since_unix_s), 1],
	left("expected in", "expected_unix_s"), ["", (r) => r.is_late && marked("late", "bad")],
	left("deadline in", "deadline_unix_s"), text("tenant"), ticket,
	["", (r) => html`<span class="tools">${URGENCY.slice(0, URGENCY.indexOf(r.priority)).slice(-1).map((to) => button(`Raise to ${to}`, r.model, () => raise(r, to)))}
		${button("Cancel", r.ticket, () => cancel(r.ticket,
			`All requests that wait for ${r.model} under this ticket are refused. Nothing leaves.`, async () => (await post(`queue/${named(r.ticket)}/cancel`), "It is refused.")))}</span>`]];

const JOBS = [text("job", "id"), text("kind"), tag("state"), ["done", (r) => `${r.done} of ${r.total}`, 1], count("failed"), text("model"), text("tenant"),
	["age", (r) => span(now() - r.created_unix_s), 1], ["", (r) => r.ended_unix_s || button("Cancel", r.id, () => cancel(r.id,
		`${r.total - r.done - r.failed} of ${r.total} get no answer; what is done stays.`, async () => `It is ${(await end(`jobs/${r.id}`)).state}.`))]];

export const Queue = () => html`${table("Queue", useStore().view.queue, QUEUE, "No ticket waits.", "ticket")}
	<h2>Jobs</h2>${table("Jobs", useStore().view.jobs, JOBS, "No batch, no job.", "id")}`;

const EVENTS = [["at", (e) => clock(e.unix_s)], ["kind", (e) => marked(e.kind, e.tone)], text("what", "text"), ticket];

export function Events({ search }) {
	const { events } = useStore(), [held, hold] = useState();
	return html`<${Search} value=${search} view="events" label="Filter events" />
		<label><input type="checkbox" checked=${!held} onChange=${() => hold(held ? null : [...events])} /> Follow</label>
		${table("Events", (held || events).filter((e) => has(search, e.kind, e.text, e.ticket)).slice(-300).reverse(), EVENTS, "No event matches.", "seq")}`;
}

function free(event) {
	event.preventDefault();
	const gb = Number(event.target.gb.value), body = { gb, term_s: 60 * event.target.minutes.value, name: "console" };
	propose(`Free ${gb} GiB`, async () => planned((await post("free", { ...body, dry_run: true })).plan), "Free it",
		async () => `It is held as ${(await post("free", body)).id}; drain that to give it back.`);
}

export const Leases = () => {
	const { view } = useStore();
	return html`<form class="tools" onSubmit=${free}><b>Give me my GPU back</b>
			<label>GiB <input name="gb" type="number" min="0.1" step="any" value="1" required /></label>
			<label>minutes <input name="minutes" type="number" min="1" value="60" required /></label><button class="main">Free…</button></form>
		<h2>Leases</h2>${table("Leases", view.leases, [
			text("lease", "name"), text("tenant"), tag("state"), size("held", "charged_bytes"), size("measured", "measured_bytes"),
			left("ends in", "ends_unix_s"), ticket, ["", (r) => button("Drain", r.name, () => drain(r))]], "No process outside Serve holds device memory.", "ticket")}
		<h2>Tenants</h2>${table("Tenants", view.tenants, [
			text("tenant"), size("holds", "held_bytes"), size("maximum", "most_bytes"), size("reserved", "reserved_bytes"),
			count("requests", "requests_count"), ["GiB seconds", (r) => (r.byte_seconds_count / 2 ** 30).toFixed(1), 1]], "No client has used anything yet.")}
		<h2>Pool</h2>${table("Slabs", view.slabs, [
			text("slab"), text("content"), text("owner"), ["used by", (r) => r.users.join(", ") || "idle"], text("namespace"), size("takes", "allocated_bytes"), size("of", "limit_bytes"),
			count("rows", "rows_count"), count("hits", "hits_count"), count("misses", "misses_count")], "No engine keeps anything beyond its life.")}`;
};

// Bytes as the configuration takes them, exactly; times end in _s.
const sized = (key, value) => {
	if (!Number.isInteger(value) || value < 2 ** 20 || key.endsWith("_s")) return value;
	const gib = +(value / 2 ** 30).toFixed(2);
	return gib >= 1 && Math.round(gib * 2 ** 30) === value ? `${gib} GiB` : `${value / 2 ** 20} MiB`;
};

export function Settings() {
	const [found, set] = useState(), [failed, fail] = useState();
	const read = () => get("settings").then(set, (error) => fail(error.message));
	useEffect(() => void read(), []);
	const change = (name, old, event) => {
		const value = event.target.value;
		event.target.value = old;
		propose(`Change ${name}`, async () => html`<p>From <code>${old}</code> to <code>${value || "its default"}</code>. A new epoch begins: holders rejoin with what they hold.</p>`, "Change it",
			async () => (await put("settings", { generation: found.generation, settings: { [name]: value ? JSON.parse(value) : null } }), read(), "It is changed."));
	};
	return found ? html`<p class="muted">Generation ${found.generation}. Values are JSON; an empty one is the default.</p>
		${table("Settings", Object.entries(found.settings).map(([name, value]) => ({ name, value: JSON.stringify({ [name]: value }, sized).slice(name.length + 4, -1) })), [text("setting", "name"),
			["value", (r) => html`<${r.value.length > 60 ? "textarea" : "input"} class="wide" aria-label=${r.name} value=${r.value} onChange=${(event) => change(r.name, r.value, event)} />`]], "", "name")}` : html`<p role="alert">${failed}</p>`;
}

export function Ask() {
	const { models } = useStore(), [shown, set] = useState("A dry run by the arbiter's own rules: nothing changes.");
	const ask = (event) => {
		event.preventDefault();
		const { model, gb, priority } = event.target;
		planOf({ model: model.value, gb: Number(gb.value) || undefined, priority: priority.value }).then(set, (error) => set(html`<p role="alert" class="bad">${error.message}</p>`));
	};
	return html`<form class="tools" onSubmit=${ask}><label>Model <input name="model" list="models" /></label>
			<datalist id="models">${[...models.values()].map((row) => html`<option value=${row.model} />`)}</datalist>
			<label>or GiB <input name="gb" type="number" min="0" step="any" /></label>
			<label>priority <select name="priority">${URGENCY.map((to) => html`<option value=${to} selected=${to === "normal"}>${to}</option>`)}</select></label>
			<button class="main">Can I?</button></form>
		<div class="card" aria-live="polite">${shown}</div>`;
}

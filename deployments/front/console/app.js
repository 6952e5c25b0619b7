// The frame: views by the address's hash, what needs attention, title and favicon.
import { render } from "./vendor/preact.mjs";
import { follow } from "./data.js";
import { bytes, clock, Dialog, html, KeyForm, useEffect, useState, useStore } from "./ui.js";
import { Memory } from "./memory.js";
import { Ask, Events, Leases, Models, Queue, Settings } from "./views.js";

const VIEWS = { memory: ["Memory", Memory], models: ["Models", Models], queue: ["Queue", Queue], events: ["Events", Events],
	leases: ["Leases and tenants", Leases], settings: ["Settings", Settings], ask: ["Can I?", Ask] };

function place() {
	const [name, search = ""] = location.hash.slice(1).split("?");
	return { name: VIEWS[name] ? name : "memory", search: decodeURIComponent(search) };
}

function alertsOf({ view, isUp, away }) {
	const gone = !isUp ? "The front does not answer; what you see is old." : away && `No arbiter has answered since ${clock(away)}. Requests on loaded models are served.`;
	return [...(gone ? [{ level: "critical", text: gone }] : []), ...(view?.alerts || [])];
}

function tell(view, count) {
	const devices = (view?.devices || []).filter((row) => row.kind !== "host");
	const sum = (field) => devices.reduce((total, row) => total + Math.max(0, row[field]), 0), free = sum("free_bytes");
	document.title = `${view ? `${bytes(free)} free` : "arbiter"}${count ? ` · ${count} alert${count > 1 ? "s" : ""}` : ""}`;
	const svg = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path fill="#9ab" d="M0 0h16v16H0z"/>
		<path fill="#47a" d="M0 ${16 * (free / sum("budget_bytes") || 0)}h16v16H0z"/>${count ? '<circle cx="12" cy="4" r="4" fill="#d33"/>' : ""}</svg>`;
	document.getElementById("icon").href = `data:image/svg+xml,${encodeURIComponent(svg)}`;
}

function keys(event) {
	if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
	const name = Object.keys(VIEWS)[event.key - 1];
	if (name) location.hash = name;
	if (event.key === "/") {
		event.preventDefault();
		document.getElementById("search")?.focus();
	}
}

function App() {
	const store = useStore(), [{ name, search }, go] = useState(place), { view } = store, alerts = alertsOf(store), [title, View] = VIEWS[name];
	useEffect(() => {
		addEventListener("hashchange", () => go(place()));
		addEventListener("keydown", keys);
	}, []);
	useEffect(() => tell(view, alerts.length));
	const state = !store.isUp ? "not connected" : store.away ? "arbiter away" : "live";
	return html`<header><b>arbiter</b><nav aria-label="Views">${Object.entries(VIEWS).map(([to, [label]], i) => html`<a href=${`#${to}`} title=${`Key ${i + 1}`}
			aria-current=${to === name ? "page" : null}>${label}${to === "queue" && view?.queue.length > 0 && ` (${view.queue.length})`}</a>`)}</nav>
			<small role="status" class=${state === "live" ? "good" : "bad"}>${state}</small></header>
		<main><h1 class="hidden">${title}</h1>${store.refusal ? html`<div class="card"><${KeyForm} why=${store.refusal} /></div>` : html`
			<div class="attention" role="status">${alerts.length ? html`<ul class="card">${alerts.map((row) => html`<li class=${row.level}>${row.text}</li>`)}</ul>`
				: html`<p class="good">Nothing needs attention.</p>`}</div>
			${view && html`<${View} search=${search} />`}`}</main>
		${view && html`<footer class="muted">arbiter ${view.version}, epoch ${view.epoch}, policy ${view.policy}</footer>`}
		${store.dialog && html`<${Dialog} dialog=${store.dialog} key=${store.dialog.title} />`}`;
}

document.body.textContent = "";
render(html`<${App} />`, document.body);
follow();

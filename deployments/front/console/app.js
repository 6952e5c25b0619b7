// The frame: views by the address's hash, what needs attention, title and favicon.
import { render } from "./vendor/preact.mjs";
import { follow } from "./data.js";
import { bytes, clock, computing, Dialog, html, KeyForm, useEffect, useState, useStore } from "./ui.js";
import { Memory } from "./memory.js";
import { Ask, Events, Leases, Models, Queue, Settings } from "./views.js";

const VIEWS = { memory: ["Memory", Memory], models: ["Models", Models], queue: ["Queue", Queue], events: ["Events", Events],
  leases: ["Leases and tenants", Leases], settings: ["Settings", Settings], ask: ["Can I?", Ask] };

function place() {
  const [name, search] = location.hash.slice(1).split("?");
  return { name: VIEWS[name] ? name : "memory", search: decodeURIComponent(search || "") };
}

function alarms({ view, isUp, awaySince }) {
  const away = awaySince && `No arbiter has answered since ${clock(awaySince)}; requests on loaded models are served.`;
  const gone = !isUp && "The front does not answer; what you see is old.";
  return [gone || away].filter(Boolean).map((text) => ({ level: "critical", about: "arbiter", text })).concat(view?.alarms || []);
}

function tell(view, found) {
  const devices = computing(view);
  const free = devices.reduce((sum, row) => sum + Math.max(0, row.free_bytes), 0);
  const part = free / (devices.reduce((sum, row) => sum + row.budget_bytes, 0) || 1);
  document.title = `${view ? `${bytes(free)} free` : "arbiter"}${found.length ? ` · ${found.length} alarm${found.length > 1 ? "s" : ""}` : ""}`;
  const dot = found.length ? "<circle cx='12' cy='4' r='4' fill='#d33'/>" : "";
  const svg = `<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><rect width='16' height='16' rx='3' fill='#9ab'/>
    <rect y='${16 * part}' width='16' height='16' rx='3' fill='#47a'/>${dot}</svg>`;
  document.getElementById("icon").href = `data:image/svg+xml,${encodeURIComponent(svg)}`;
}

function keys(event) {
  if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const name = Object.keys(VIEWS)[Number(event.key) - 1];
  if (name) location.hash = name;
  if (event.key === "/") {
    document.getElementById("search")?.focus();
    event.preventDefault();
  }
}

function App() {
  const store = useStore(), [{ name, search }, go] = useState(place());
  useEffect(() => {
    addEventListener("hashchange", () => go(place()));
    addEventListener("keydown", keys);
  }, []);
  const { view } = store, found = alarms(store), [title, View] = VIEWS[name];
  useEffect(() => tell(view, found));
  return html`<header class="top"><a href="#memory" class="brand">arbiter</a>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([to, [label]], i) => html`<a href=${`#${to}`} title=${`Key ${i + 1}`}
        aria-current=${to === name ? "page" : null}>${label}${to === "queue" && view?.queue.length ? ` (${view.queue.length})` : ""}</a>`)}</nav>
      <span class=${`link-state ${store.isUp && !store.awaySince ? "up" : "down"}`} role="status">${store.isUp ? (store.awaySince ? "arbiter away" : "live") : "not connected"}</span></header>
    <main><h1 class="hidden">${title}</h1>
      ${store.refusal ? html`<div class="card"><${KeyForm} why=${store.refusal} /></div>` : html`
        <div class="attention" role="status">${found.length ? html`<ul>${found.map((row) => html`<li class=${row.level}>${row.text}</li>`)}</ul>`
          : html`<p class="calm">${view ? "Nothing needs attention." : "Asking the arbiter…"}</p>`}</div>
        ${view && html`<${View} search=${search} />`}`}</main>
    ${view && html`<footer class="muted">arbiter ${view.version}, epoch ${view.epoch}, policy ${view.policy}</footer>`}
    ${store.dialog && html`<${Dialog} dialog=${store.dialog} key=${store.dialog.title} />`}`;
}

render(html`<${App} />`, document.getElementById("app"));
follow();

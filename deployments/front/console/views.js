// Models, queue, events, leases and tenants, settings, and the dry run.
import { call, store } from "./data.js";
import { Act, Fragment, bytes, clock, html, now, Plan, planOf, propose, span, Table, Tag, Ticket, useEffect, useState, useStore, useTick } from "./ui.js";

const SHOWN = 60;
const path = (name) => name.split("/").map(encodeURIComponent).join("/");
const inUse = (row) => (row.inflight ? `${row.inflight} requests are in flight: its bytes stay until they end.` : "It is idle.");
const until = (unix) => (unix == null ? "–" : span(unix - now()));

// -- acts on models --------------------------------------------------------------------------------

const load = (row) => propose(`Load ${row.model}`, () => planOf({ model: row.model }), "Load it",
  async () => (await call("POST", `/arbiter/models/load/${path(row.model)}`), `${row.model} is asked for.`));

const unload = (row) => propose(`Unload ${row.model}`, async () => html`<p>${row.tickets.join(", ")} would leave:
    ${" "}<b>${bytes(row.charged_bytes)}</b> come back; a new load takes ${span(row.load_s)}. ${inUse(row)}</p>`, "Unload it",
  async () => `Asked to leave: ${(await call("POST", `/arbiter/models/unload/${path(row.model)}`)).tickets.join(", ") || "none"}.`);

const FLOORS = { device: "It is loaded now and stays on the device.", host: "It may sleep, and stays in RAM.", cold: "It may leave altogether." };

const floor = (row, to) => propose(`Floor ${to} for ${row.model}`, async () => html`<p>${FLOORS[to]} Now: ${row.floor}.</p>
    ${to === "device" && (await planOf({ model: row.model }))}`, `Set ${to}`,
  async () => (await call("PUT", `/arbiter/residency/${path(row.model)}`, { floor: to }), `The floor of ${row.model} is ${to}.`));

function tiers(row) {
  const a = row.adapters;
  return a && html`<a href=${`#models?${row.model}:`} aria-label=${`Adapters of ${row.model}`}>${a.hot} hot, ${a.warm} warm, ${a.cold} cold</a>`;
}

const Acts = ({ row }) => html`<span class="acts"><${Act} label="Load" of=${row.model} onClick=${() => load(row)} />
  ${row.tickets.length > 0 && html`<${Act} label="Unload" of=${row.model} onClick=${() => unload(row)} />`}
  <select aria-label=${`Floor of ${row.model}`} value=${row.floor} onChange=${(event) => {
    floor(row, event.target.value);
    event.target.value = row.floor;
  }}>${Object.keys(FLOORS).map((to) => html`<option value=${to}>floor: ${to}</option>`)}</select></span>`;

const loading = (row) => (row.state === "loading" && row.load_s ? ` ${span(now() - row.since_unix_s)} of ${span(row.load_s)}` : "");

export function Models({ search }) {
  const store = useStore(), [all, every] = useState(false);
  useTick();
  const words = search.toLowerCase();
  const rows = [...store.models.values()].filter((row) => `${row.model} ${row.capability} ${row.state}`.toLowerCase().includes(words))
    .sort((a, b) => (a.state === "cold") - (b.state === "cold") || (a.model < b.model ? -1 : 1));
  return html`<${Search} value=${search} view="models" label="Search models and adapters" />
    <p class="muted" role="status">${rows.length} of ${store.models.size} models</p>
    <${Table} label="Models" rows=${all ? rows : rows.slice(0, SHOWN)} keyOf=${(r) => r.capability + r.model} empty="No model has this name." heads=${[
      ["model", (r) => html`<b>${r.model}</b> <small>${r.capability}</small>`],
      ["state", (r) => html`<${Tag} of=${r.state} />${loading(r)}${r.leaving && ` ${r.leaving}`}${!r.is_open && ` opens at ${r.hours}`}${r.failure && html` <span class="bad">${r.failure}</span>`}`],
      ["floor", (r) => html`${r.is_pinned ? "pinned" : r.floor}`],
      ["leaves in", (r) => until(r.leaves_unix_s), 1], ["in flight", (r) => r.inflight || "–", 1],
      ["held", (r) => (r.charged_bytes || r.host_bytes ? bytes(r.charged_bytes || r.host_bytes) : "–"), 1],
      ["learned", (r) => (r.learned_bytes ? bytes(r.learned_bytes) : "–"), 1],
      ["load", (r) => span(r.load_s), 1], ["wake", (r) => span(r.wake_s), 1],
      ["adapters", tiers], ["", (r) => html`<${Acts} row=${r} />`]]} />
    ${rows.length > SHOWN && !all && html`<button onClick=${() => every(true)}>Show ${rows.length - SHOWN} more</button>`}
    <${Adapters} search=${search} />`;
}

function Adapters({ search }) {
  const [found, set] = useState({ count: 0, adapters: [] });
  useEffect(() => {
    const timer = setTimeout(() => call("GET", `/arbiter/view/adapters?search=${encodeURIComponent(search)}`).then(set, () => 0), 200);
    return () => clearTimeout(timer);
  }, [search]);
  if (!found.count) return null;
  return html`<section class="card" aria-label="Adapters"><h2>Adapters <small>${found.adapters.length} of ${found.count}</small></h2>
    <ul class="names">${found.adapters.map((name) => html`<li key=${name}>${name}</li>`)}</ul></section>`;
}

function Search({ value, view, label }) {
  return html`<input type="search" id="search" aria-label=${label} placeholder=${`${label} ( / )`} value=${value}
    onInput=${(event) => location.replace(`#${view}?${encodeURIComponent(event.target.value)}`)} />`;
}

// -- the queue ---------------------------------------------------------------------------------

const URGENCY = ["urgent", "high", "normal", "low", "batch"];

const raise = (row, to) => propose(`Raise ${row.model} to ${to}`, async () => (await planOf({ model: row.model, priority: to })), "Raise it",
  async () => (await call("POST", `/arbiter/queue/${path(row.ticket)}/raise`, { priority: to }), `It waits with priority ${to}.`));

const cancel = (row) => propose(`Cancel ${row.ticket}`, async () => html`<p>All requests that wait for ${row.model} under this ticket
    are refused; ${bytes(row.need_bytes)} are asked for no more. Nothing that is loaded leaves.</p>`, "Cancel it",
  async () => (await call("POST", `/arbiter/queue/${path(row.ticket)}/cancel`), "It is refused."));

export function Queue() {
  const { view } = useStore();
  useTick();
  return html`<${Table} label="Queue" rows=${view.queue} keyOf=${(r) => r.ticket} empty="No ticket waits." heads=${[
    ["position", (r) => r.position, 1], ["model", (r) => html`<b>${r.model}</b> <small>${r.capability}</small>`], ["priority", (r) => html`<${Tag} of=${r.priority} />`],
    ["waits for", (r) => bytes(r.need_bytes), 1], ["waited", (r) => span(now() - r.since_unix_s), 1],
    ["expected in", (r) => html`<span class=${r.is_late && "bad"}>${until(r.expected_unix_s)}${r.is_late ? " late" : ""}</span>`, 1],
    ["deadline in", (r) => until(r.deadline_unix_s), 1], ["tenant", (r) => r.tenant],
    ["ticket", (r) => html`<${Ticket} id=${r.ticket} />`],
    ["", (r) => html`<span class="acts">${URGENCY.slice(0, URGENCY.indexOf(r.priority)).slice(-1).map((to) => html`<${Act} label=${`Raise to ${to}`} of=${r.model} onClick=${() => raise(r, to)} />`)}
      <${Act} label="Cancel" of=${r.ticket} onClick=${() => cancel(r)} /></span>`]]} />
    <p class="muted">There are no jobs: work that waits in the background does not exist yet.</p>`;
}

// -- events ------------------------------------------------------------------------------------

export function Events({ search }) {
  const { events } = useStore(), [held, hold] = useState(null);
  const words = search.toLowerCase();
  const rows = (held || events).filter((e) => `${e.kind} ${e.text} ${e.ticket || ""}`.toLowerCase().includes(words)).slice(-300).reverse();
  return html`<${Search} value=${search} view="events" label="Filter events" />
    <label class="check"><input type="checkbox" checked=${!held} onChange=${() => hold(held ? null : [...events])} /> Follow</label>
    <${Table} label="Events" rows=${rows} keyOf=${(e) => e.seq} empty="No event matches." heads=${[
      ["at", (e) => clock(e.unix_s)], ["kind", (e) => html`<${Tag} of=${e.kind.replaceAll("_", " ")} tone=${e.tone} />`],
      ["what", (e) => e.text], ["ticket", (e) => e.ticket && html`<${Ticket} id=${e.ticket} />`]]} />`;
}

// -- leases and tenants ------------------------------------------------------------------------

const drain = (row) => propose(`Drain ${row.name}`, async () => html`<p>${row.tenant} is told to give ${bytes(row.charged_bytes)} back.
    Its process ends the work that it does there, or is ended when its notice is over.</p>`, "Give notice",
  async () => (await call("POST", `/arbiter/leases/${path(row.ticket)}/drain`), `${row.name} has its notice.`));

function free(event) {
  event.preventDefault();
  const gb = Number(event.target.gb.value), term_s = 60 * Number(event.target.minutes.value), name = "console";
  propose(`Free ${gb} GiB for ${span(term_s)}`, async () => html`<${Plan} plan=${(await call("POST", "/arbiter/free", { gb, term_s, name, dry_run: true })).plan} />`, "Free it",
    async () => `Held as ${(await call("POST", "/arbiter/free", { gb, term_s, name })).id}; drain it to give it back.`);
}

export function Leases() {
  const { view } = useStore();
  useTick();
  return html`<form class="tools" onSubmit=${free}><b>Give me my GPU back</b>
      <label>GiB <input name="gb" type="number" min="0.1" step="0.1" value="1" required /></label>
      <label>for minutes <input name="minutes" type="number" min="1" value="60" required /></label><button>Free…</button></form>
    <h2>Leases</h2><${Table} label="Leases" rows=${view.leases} keyOf=${(r) => r.ticket} empty="No process outside Serve holds device memory." heads=${[
      ["lease", (r) => html`<b>${r.name}</b>`], ["tenant", (r) => r.tenant], ["state", (r) => html`<${Tag} of=${r.state} />`],
      ["held", (r) => bytes(r.charged_bytes), 1], ["measured", (r) => bytes(r.measured_bytes), 1], ["ends in", (r) => until(r.ends_unix_s), 1],
      ["preemptible", (r) => (r.is_preemptible ? "yes" : "no")], ["ticket", (r) => html`<${Ticket} id=${r.ticket} />`],
      ["", (r) => html`<${Act} label="Drain" of=${r.name} onClick=${() => drain(r)} />`]]} />
    <h2>Tenants</h2><${Table} label="Tenants" rows=${view.tenants} empty="No client has used anything yet." heads=${[
      ["tenant", (r) => html`<b>${r.tenant}</b>${r.is_cooling && html` <${Tag} of="cooling" tone="bad" />`}`], ["holds", (r) => bytes(r.held_bytes), 1],
      ["maximum", (r) => bytes(r.most_bytes), 1], ["reserved", (r) => bytes(r.reserved_bytes), 1], ["requests", (r) => r.requests_count, 1],
      ["GiB seconds", (r) => (r.byte_seconds_count / 2 ** 30).toFixed(1), 1]]} />
    <h2>Pool</h2><${Table} label="Slabs" rows=${view.slabs} empty="No engine keeps anything in host RAM beyond its life." heads=${[
      ["slab", (r) => r.slab], ["content", (r) => r.content], ["owner", (r) => r.owner], ["takes", (r) => bytes(r.allocated_bytes), 1],
      ["of", (r) => bytes(r.limit_bytes), 1], ["rows", (r) => r.rows_count, 1], ["hits", (r) => r.hits_count, 1], ["misses", (r) => r.misses_count, 1]]} />`;
}

// -- settings and the dry run --------------------------------------------------------------------

export function Settings() {
  const [found, set] = useState(null), [said, say] = useState("");
  const read = () => call("GET", "/arbiter/settings").then(set, (error) => say(error.message));
  useEffect(() => void read(), []);
  const change = (name, old) => (event) => {
    const text = event.target.value;
    event.target.value = JSON.stringify(old);
    propose(`Change ${name}`, async () => html`<p>From <code>${JSON.stringify(old)}</code> to <code>${text}</code>. A new epoch begins:
      holders rejoin with all that they hold, and nothing leaves by the change itself.</p>`, "Change it",
      async () => (await call("PUT", "/arbiter/settings", { generation: found.generation, settings: { [name]: text ? JSON.parse(text) : null } }), read(), "It is changed."));
  };
  return html`<p role="status" class="muted">${said}${found && `Generation ${found.generation}. Values are JSON; an empty one is the default.`}</p>
    ${found && html`<${Table} label="Settings" rows=${Object.entries(found.settings)} keyOf=${([name]) => name} heads=${[
      ["setting", ([name]) => html`<code>${name}</code>`],
      ["value", ([name, value]) => html`<input class="wide" aria-label=${name} value=${JSON.stringify(value)} onChange=${change(name, value)} />`]]} />`}`;
}

export function Ask() {
  const [shown, set] = useState(null);
  const ask = (event) => {
    event.preventDefault();
    const { model, gb, priority } = event.target;
    const body = { priority: priority.value, ...(model.value && { model: model.value }), ...(gb.value && { gb: Number(gb.value) }) };
    planOf(body).then(set, (error) => set(html`<p role="alert" class="bad">${error.message}</p>`));
  };
  return html`<form class="tools" onSubmit=${ask}><label>Model <input name="model" list="models" /></label>
      <datalist id="models">${[...store.models.values()].map((row) => html`<option value=${row.model} />`)}</datalist>
      <label>or GiB <input name="gb" type="number" min="0.01" step="any" /></label>
      <label>priority <select name="priority">${URGENCY.map((p) => html`<option selected=${p === "normal"}>${p}</option>`)}</select></label>
      <button class="main">Can I?</button></form>
    <div class="card" aria-live="polite">${shown || html`<p class="muted">A dry run by the arbiter's own rules: now, after evicting which models, not before when, or never. Nothing changes.</p>`}</div>`;
}

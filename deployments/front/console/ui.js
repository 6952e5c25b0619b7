// Words, numbers, tables and the dialog that shows an act's victims before it happens.
import { h, Fragment } from "./vendor/preact.mjs";
import { useEffect, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { call, changed, show, store, subscribe, useKey } from "./data.js";

export const html = htm.bind(h);
export { Fragment, useEffect, useRef, useState };

export function bytes(size) {
  if (size == null) return "–";
  const big = Math.abs(size) >= 2 ** 30;
  return `${(size / 2 ** (big ? 30 : 20)).toFixed(big ? 2 : 1)} ${big ? "GiB" : "MiB"}`;
}

export function span(s) {
  if (s == null) return "–";
  if (s < 0) return `−${span(-s)}`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const now = () => Date.now() / 1000;
export const computing = (view) => (view?.devices || []).filter((row) => row.kind !== "host");

export function useStore() {
  const [, draw] = useState(0);
  useEffect(() => subscribe(() => draw((n) => n + 1)), []);
  return store;
}

export function useTick() {
  const [, draw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || draw((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, []);
}

export const Tag = ({ of, tone }) => html`<span class=${`tag ${tone || of}`}>${of.replace("_", " ")}</span>`;

// heads: [title, row => cell, isNumber]
export function Table({ label, heads, rows, empty, keyOf }) {
  if (!rows.length) return html`<p class="none">${empty}</p>`;
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0"><table>
    <thead><tr>${heads.map(([title, , number]) => html`<th scope="col" class=${number && "number"}>
      ${title || html`<span class="hidden">Acts</span>`}</th>`)}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${keyOf ? keyOf(row) : index}>
      ${heads.map(([title, cell, number]) => html`<td data-head=${title} class=${number && "number"}>${cell(row)}</td>`)}
    </tr>`)}</tbody></table></div>`;
}

export function Act({ label, of, onClick, kind }) {
  return html`<button class=${kind || "small"} aria-label=${of ? `${label} ${of}` : label} onClick=${onClick}>${label}</button>`;
}

export function Ticket({ id }) {
  return html`<button class="link" title="Explain" onClick=${() => explain(id)}>${id}</button>`;
}

// -- the dialog ----------------------------------------------------------------------------------

// look: what the dialog shows first, asked before anything happens; run: the act.
export const propose = (title, look, label, run) => show({ title, look, label, run });

export function explain(ticket) {
  propose(`Explain ${ticket}`, async () => {
    const found = await call("GET", `/arbiter/explain/${encodeURIComponent(ticket)}`);
    return html`<ul class="said">${found.said.map((line) => html`<li>${line}</li>`)}</ul>`;
  });
}

const ANSWERS = {
  now: "Yes, now.", after_evicting: "Yes, after evicting:", not_before: "Not yet.", never: "No.",
};

export function Plan({ plan }) {
  const wait = plan.wait_s ? `It may begin in ${span(plan.wait_s)}.` : "";
  const load = plan.load_s ? `A load takes ${span(plan.load_s)}.` : "";
  return html`<p class="answer"><strong>${ANSWERS[plan.answer]}</strong> ${plan.model} needs
      ${" "}${bytes(plan.need_bytes)}. ${wait} ${load}</p>
    ${plan.victims.length > 0 && html`<${Table} label="What would go" rows=${plan.victims} heads=${[
      ["goes", (v) => v.model], ["frees", (v) => bytes(sum(v.freed_bytes)), 1],
      ["how", (v) => (v.goes === "gone" ? "leaves" : v.goes)],
      ["back in", (v) => (v.reload_s ? span(v.reload_s) : "–"), 1],
      ["idle", (v) => span(v.idle_s), 1], ["used by", (v) => v.client || v.tenant]]} />`}
    <ul class="said">${plan.said.map((line) => html`<li>${line}</li>`)}
      ${(plan.stays || []).map((s) => html`<li>${s.model} stays: ${s.why}</li>`)}</ul>`;
}

const sum = (sizes) => Object.values(sizes).reduce((total, size) => total + size, 0);

export const planOf = async (body) => html`<${Plan} plan=${await call("POST", "/arbiter/plan", body)} />`;

export function KeyForm({ why, onUsed }) {
  const field = useRef();
  const use = (event) => {
    event.preventDefault();
    useKey(field.current.value.trim());
    onUsed?.();
  };
  return html`<form class="key" onSubmit=${use}><p role="alert">${why}</p>
    <label>API key <input ref=${field} type="password" autocomplete="off" required /></label>
    <button>Use this key</button>
    <p class="muted">It stays in this tab. The first start wrote one with every scope beside the
      arbiter's state, in admin.key; ${" "}<code>arbiter key add</code> makes others.</p></form>`;
}

export function Dialog({ dialog }) {
  const box = useRef();
  const [phase, set] = useState({ name: "looking" });
  const attempt = (name, work, then) => {
    set({ name });
    work().then(then, (error) => set({ name: "refused", error, again: () => attempt(name, work, then) }));
  };
  const look = () => attempt("looking", dialog.look, (content) => set({ name: "shown", content }));
  const run = () => attempt("doing", dialog.run, (said) => set({ name: "done", said: said || "Done." }));
  const close = () => (store.dialog = null, changed());
  useEffect(() => {
    box.current.showModal();
    look();
  }, [dialog]);
  return html`<dialog ref=${box} onClose=${close} aria-labelledby="dialog-title">
    <h2 id="dialog-title">${dialog.title}</h2>
    <div aria-live="polite" class="content">
      ${phase.name === "looking" && html`<p>Asking what would happen…</p>`}
      ${phase.name === "doing" && html`<p>Asking the arbiter…</p>`}
      ${phase.name === "shown" && phase.content}
      ${phase.name === "done" && html`<p class="answer">${phase.said}</p>`}
      ${phase.name === "refused" && (phase.error.needsKey
        ? html`<${KeyForm} why=${phase.error.message} onUsed=${phase.again} />`
        : html`<p role="alert" class="bad">${phase.error.message}</p>`)}
    </div>
    <menu>
      ${phase.name === "shown" && dialog.run && html`<button class="main" onClick=${run}>${dialog.label}</button>`}
      <button onClick=${() => box.current.close()}>${phase.name === "shown" && dialog.run ? "Cancel" : "Close"}</button>
    </menu></dialog>`;
}

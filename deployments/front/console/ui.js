// Numbers, tables, and the dialog that shows what an act would do before it happens.
import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { get, post, show, store, subscribe, useKey } from "./data.js";

export { html, useEffect, useRef, useState };

export function bytes(size) {
	if (size == null) return "–";
	const big = Math.abs(size) >= 2 ** 30;
	return `${(size / 2 ** (big ? 30 : 20)).toFixed(big ? 2 : 1)} ${big ? "GiB" : "MiB"}`;
}

export function span(s) {
	if (s == null) return "–";
	if (s < 10) return `${s.toFixed(1)} s`;
	if (s < 120) return `${Math.round(s)} s`;
	return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const now = () => Date.now() / 1000;

// Draws again when the store changes, and each second for what counts down.
export function useStore() {
	const [, set] = useState(0);
	useEffect(() => {
		const draw = () => document.hidden || set((n) => n + 1), leave = subscribe(draw), timer = setInterval(draw, 1000);
		return () => (leave(), clearInterval(timer));
	}, []);
	return store;
}

export const marked = (word, tone = word) => html`<span class=${`tag ${tone}`}>${word.replaceAll("_", " ")}</span>`;

// Columns: a title, what is shown of a row, and whether that is a number.
export const text = (title, field = title) => [title, (row) => row[field]];
export const size = (title, field) => [title, (row) => bytes(row[field] || null), 1];
export const took = (title, field) => [title, (row) => span(row[field] || null), 1];
export const left = (title, field) => [title, (row) => (row[field] ? span(row[field] - now()) : "–"), 1];
export const count = (title, field = title) => [title, (row) => row[field] || "–", 1];
export const tag = (title, field = title) => [title, (row) => marked(row[field])];
export const ticket = ["ticket", (row) => row.ticket && html`<button class="link" title="Explain" onClick=${() => explain(row.ticket)}>${row.ticket}</button>`];

export function table(label, rows, of, empty, by) {
	if (!rows.length) return html`<p class="none">${empty}</p>`;
	return html`<div class="scroll" role="region" aria-label=${label} tabindex="0"><table>
		<thead><tr>${of.map(([title, , number]) => html`<th class=${number && "number"}>${title || html`<span class="hidden">acts</span>`}</th>`)}</tr></thead>
		<tbody>${rows.map((row) => html`<tr key=${by && row[by]}>${of.map(([title, cell, number]) => {
			const v = cell(row);
			return html`<td data-head=${title} class=${`${number ? "number" : ""} ${!v || v === "–" ? "empty" : ""}`}>${v}</td>`;
		})}</tr>`)}</tbody></table></div>`;
}

export const button = (label, of, onClick) => html`<button class="small" aria-label=${`${label} ${of}`} onClick=${onClick}>${label}</button>`;

// `look` is shown first, and asked before anything happens; `run` is the act.
export const propose = (title, look, label, run) => show({ title, look, label, run });

const explain = (id) => propose(`Explain ${id}`, async () => list((await get(`explain/${encodeURIComponent(id)}`)).sentences));

const list = (lines) => html`<ul>${lines.map((line) => html`<li>${line}</li>`)}</ul>`;

const ANSWERS = { now: "Yes, now.", after_evicting: "Yes, after evicting:", not_before: "Not yet.", never: "No." };

export const planned = (plan) => html`<p><b>${ANSWERS[plan.answer]}</b> ${plan.model} needs ${bytes(plan.need_bytes)}.
		${plan.wait_s > 0 && ` It may begin in ${span(plan.wait_s)}.`}${plan.load_s > 0 && ` Its load takes ${span(plan.load_s)}.`}</p>
	${table("What would go", plan.victims, [text("goes", "model"), ["frees", (v) => bytes(Object.values(v.freed_bytes).reduce((a, b) => a + b, 0)), 1],
		text("how", "goes"), took("back in", "reload_s"), took("idle", "idle_s"), ["used by", (v) => v.client || v.tenant]])}
	${list([...plan.sentences, ...(plan.stays || []).map((s) => `${s.model} stays: ${s.why}`)])}`;

export const planOf = async (body) => planned(await post("plan", body));

export function KeyForm({ why, onUsed }) {
	const use = (event) => {
		event.preventDefault();
		useKey(event.target.key.value.trim());
		onUsed?.();
	};
	return html`<form onSubmit=${use}><p role="alert" class="bad">${why}</p>
		<label>API key <input name="key" type="password" autocomplete="off" required /></label> <button class="main">Use it</button>
		<p class="muted">It stays in this tab. admin.key beside the arbiter's state has one with every scope.</p></form>`;
}

export function Dialog({ dialog }) {
	const box = useRef(), [{ at, shown, error, again }, set] = useState({});
	const attempt = (to, work) => {
		set({ at: "asking" });
		work().then((shown) => set({ at: to, shown }), (error) => set({ error, again: () => attempt(to, work) }));
	};
	useEffect(() => {
		box.current.showModal();
		attempt("shown", dialog.look);
	}, []);
	const asks = at === "shown" && dialog.run;
	return html`<dialog ref=${box} onClose=${() => show(null)} aria-labelledby="what"><h2 id="what">${dialog.title}</h2>
		<div aria-live="polite" class="content">${at === "asking" ? "Asking the arbiter…" : shown}
			${error && (error.needsKey ? html`<${KeyForm} why=${error.message} onUsed=${again} />` : html`<p role="alert" class="bad">${error.message}</p>`)}</div>
		<div class="tools">${asks && html`<button class="main" onClick=${() => attempt("done", dialog.run)}>${dialog.label}</button>`}
			<button onClick=${() => box.current.close()}>${asks ? "Cancel" : "Close"}</button></div></dialog>`;
}

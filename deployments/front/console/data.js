// What the stream has told, and calls with the key. One stream for the tab, none while it is hidden.
export const store = { models: new Map(), events: [], samples: [], pause: 0 };
const KEPT_EVENTS = 2000, KEPT_S = 3600, SILENT_MS = 30000;
const listeners = new Set();
let stream, wake;

export function subscribe(listener) {
	listeners.add(listener);
	return () => listeners.delete(listener);
}

export const changed = () => listeners.forEach((listener) => listener());

export function show(dialog) {
	store.dialog = dialog;
	changed();
}

export function useKey(text) {
	sessionStorage.setItem("key", text);
	store.refusal = "";
	again();
}

async function ask(path, options = {}) {
	const key = sessionStorage.getItem("key");
	const answer = await fetch(`/arbiter/${path}`, { ...options, headers: key ? { authorization: `Bearer ${key}` } : {} });
	if (answer.ok) return answer;
	const body = await answer.json().catch(() => 0);
	throw Object.assign(Error(body?.error?.message || `${answer.status} ${answer.statusText}`), { needsKey: [401, 403].includes(answer.status) });
}

const send = (method) => async (path, body) => (await ask(path, { method, body: body && JSON.stringify(body) })).json();
export const get = send("GET"), post = send("POST"), put = send("PUT"), end = send("DELETE");

function add(list, rows = [], field) {
	const last = list.at(-1)?.[field] || 0;
	list.push(...rows.filter((row) => row[field] > last));
}

function take(message) {
	if ("away_unix_s" in message) store.away = message.away_unix_s;
	if (message.view) store.view = { ...store.view, ...message.view };
	if (message.view && store.isNew) store.isNew = store.models.clear();
	for (const row of message.models || []) store.models.set(`${row.capability}/${row.model}`, row);
	for (const name of message.gone || []) store.models.delete(name);
	add(store.events, message.events, "seq");
	add(store.samples, message.samples, "unix_s");
	store.events.splice(0, store.events.length - KEPT_EVENTS);
	while (store.samples[0]?.unix_s < Date.now() / 1000 - KEPT_S) store.samples.shift();
}

async function read(reader, alive) {
	for (let rest = ""; ;) {
		const { value, done } = await reader.read();
		if (done) return;
		alive();
		const parts = (rest + value).split("\n\n");
		rest = parts.pop();
		store.isUp = true;
		for (const part of parts) {
			const data = part.split("\ndata: ")[1];
			if (data) take(JSON.parse(data));
		}
		changed();
	}
}

async function once() {
	let timer;
	const abort = stream = new AbortController();
	const alive = () => {
		clearTimeout(timer);
		timer = setTimeout(() => abort.abort(), SILENT_MS);
		store.pause = 100;
	};
	try {
		const answer = await ask(`view/stream?after=${store.events.at(-1)?.seq || 0}`, { signal: abort.signal });
		store.isNew = true;
		await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), alive);
	} catch (error) {
		if (error.needsKey) store.refusal = error.message;
	}
	clearTimeout(timer);
	store.isUp = false;
	changed();
}

export function again() {
	stream?.abort();
	wake?.();
}

// Resolves when the tab is visible and no key is missing, after a pause where there was a failure.
const ready = () => new Promise((resolve) => {
	const may = () => document.hidden || store.refusal || resolve();
	wake = may;
	setTimeout(may, store.pause);
});

export async function follow() {
	document.addEventListener("visibilitychange", again);
	for (;;) {
		await ready();
		store.pause = Math.min(2000, 100 + 2 * store.pause);
		await once();
	}
}

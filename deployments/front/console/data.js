// What the stream has told, and calls with the key. One stream for the tab, none while it is hidden.

export const store = {
  view: null, models: new Map(), events: [], samples: [],
  isUp: false, awaySince: null, refusal: "", dialog: null,
};
const KEPT_EVENTS = 2000, KEPT_S = 3600, SILENT_MS = 30000;
const listeners = new Set();
let stream = null, wake = null;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed() {
  for (const listener of listeners) listener();
}

export function show(dialog) {
  store.dialog = dialog;
  changed();
}

export const key = () => sessionStorage.getItem("key") || "";

export function useKey(text) {
  if (text) sessionStorage.setItem("key", text);
  else sessionStorage.removeItem("key");
  store.refusal = "";
  again();
}

function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.needsKey = status === 401 || status === 403;
  }
}

async function checked(answer) {
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, said.error?.message || `${answer.status} ${answer.statusText}`);
}

export async function call(method, path, body) {
  const options = { method, headers: headers() };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  return (await checked(await fetch(path, options))).json();
}

function take(message) {
  if ("away_unix_s" in message) store.awaySince = message.away_unix_s;
  if (message.view) store.view = { ...store.view, ...message.view };
  for (const row of message.models || []) store.models.set(`${row.capability}/${row.model}`, row);
  for (const name of message.gone || []) store.models.delete(name);
  const seen = store.events.at(-1)?.seq || 0;
  store.events.push(...(message.events || []).filter((event) => event.seq > seen));
  store.events.splice(0, store.events.length - KEPT_EVENTS);
  const last = store.samples.at(-1)?.unix_s || 0;
  store.samples.push(...(message.samples || []).filter((sample) => sample.unix_s > last));
  while (store.samples[0]?.unix_s < Date.now() / 1000 - KEPT_S) store.samples.shift();
}

async function read(answer, alive) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    let told = false;
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "));
      if (data) take(JSON.parse(data.slice(6)));
      told ||= Boolean(data);
    }
    store.isUp = true;
    if (told) changed();
  }
}

async function once() {
  const abort = (stream = new AbortController());
  let timer = 0;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => abort.abort(), SILENT_MS);
  };
  alive();
  try {
    const path = `/arbiter/view/stream?after=${store.events.at(-1)?.seq || 0}`;
    const answer = await fetch(path, { headers: headers(), signal: abort.signal });
    await read(await checked(answer), alive);
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

// Until the tab is visible, no key is missing, and a moment after a failure.
function ready(pause) {
  const may = () => !document.hidden && !store.refusal;
  return new Promise((resolve) => {
    const timer = setTimeout(() => may() && resolve(), pause);
    wake = () => may() && (clearTimeout(timer), resolve());
  });
}

export async function follow() {
  document.addEventListener("visibilitychange", again);
  for (let tries = 0; ; tries++) {
    if (document.hidden || store.refusal || tries) await ready(Math.min(2000, 100 * 2 ** tries));
    const before = store.view;
    await once();
    if (store.view !== before) tries = 0;
  }
}

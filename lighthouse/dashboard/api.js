// Requests to the lighthouse. The viewer's key comes in the address once and stays in sessionStorage.

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const KEY = "ft.key";
const ADMIN = "ft.admin";

export const viewKey = () => sessionStorage.getItem(KEY) ?? "";
export const adminToken = () => sessionStorage.getItem(ADMIN) ?? "";
export const keepViewKey = (key) => sessionStorage.setItem(KEY, key.trim());
export const keepAdminToken = (token) => sessionStorage.setItem(ADMIN, token.trim());
export const forgetAdminToken = () => sessionStorage.removeItem(ADMIN);

/** Take `key` out of the address into sessionStorage; the number of the event that the address names, or null. */
export function readAddress() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  const key = fragment.get("key");
  if (key !== null) {
    keepViewKey(key);
    fragment.delete("key");
    const rest = fragment.toString();
    history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
  }
  const event = Number.parseInt(fragment.get("event") ?? "", 10);
  return Number.isSafeInteger(event) ? event : null;
}

const bearer = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

async function answer(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // an answer without JSON: its status says what there is to say
  }
  if (response.ok && body !== null) return body;
  const detail = typeof body?.detail === "string" ? body.detail : `the lighthouse answered ${response.status}`;
  throw new ApiError(response.status, detail);
}

const DEADLINE_MS = 20_000;

/** GET `path` with `query` (null values are left out) as the viewer. Throws ApiError, TypeError, AbortError. */
export async function get(path, query = {}, signal = undefined) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const url = given.length ? `${path}?${new URLSearchParams(given)}` : path;
  const deadline = AbortSignal.timeout(DEADLINE_MS);
  const either = signal ? AbortSignal.any([signal, deadline]) : deadline;
  return answer(await fetch(url, { headers: bearer(viewKey()), signal: either, cache: "no-store" }));
}

const text = new TextEncoder();
const hex = (buffer) => Array.from(new Uint8Array(buffer), (byte) => byte.toString(16).padStart(2, "0")).join("");

async function hmac(key, said) {
  const usable = await crypto.subtle.importKey("raw", key, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  return crypto.subtle.sign("HMAC", usable, text.encode(said));
}

let challenge = "-"; // of the lighthouse; every proved answer brings the current one

/** The proved answer to one request that is signed with the admin's token. Throws ApiError, TypeError. */
async function signed(method, path, body) {
  const derived = (purpose) => hmac(text.encode(adminToken()), `ft_hsdp http 1 ${purpose}`);
  const id = hex(await derived("key id")).slice(0, 16);
  const digest = hex(await crypto.subtle.digest("SHA-256", text.encode(body ?? "")));
  const said = `${challenge} ${hex(crypto.getRandomValues(new Uint8Array(16)))} ${digest}`;
  const mac = hex(await hmac(await derived("request"), `${method} ${path} ${said}`));
  const headers = { "Content-Type": "application/json", Authorization: `FT-HMAC ${id} ${said} ${mac}` };
  const response = await fetch(path, { method, headers, body, signal: AbortSignal.timeout(DEADLINE_MS) });
  const came = await response.text();
  const [next, claimed] = (response.headers.get("ft-hmac") ?? "").split(" ");
  if (claimed !== hex(await hmac(await derived("answer"), `answer ${mac} ${next} ${response.status} ${came}`))) {
    throw new ApiError(401, "this is not the admin's token of this job, or no lighthouse of this job");
  }
  challenge = next;
  return new Response(came, { status: response.status });
}

/**
 * POST `body` as JSON, signed with the admin's token, which is never sent; ft_hsdp/http_proof.py says how. An answer
 * that does not prove the token counts as a wrong token. Throws ApiError, TypeError.
 */
export async function post(path, body) {
  if (!globalThis.crypto?.subtle) throw new ApiError(1, "orders need a page over HTTPS or a tunnel, or ft-hsdp's commands");
  await signed("GET", "/healthz"); // for the challenge
  return answer(await signed("POST", path, JSON.stringify(body)));
}

// Server-sent events over fetch, because EventSource cannot send an Authorization header.
const SILENCE_MS = 30_000; // the lighthouse pings every 10 s

/** Calls `take(kind, row)` for each message; yields nothing itself. Ends when the connection does. */
async function read(body, take, alive) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const blocks = (text + value).split(/\r?\n\r?\n/);
    text = blocks.pop();
    for (const block of blocks) parse(block, take);
  }
}

function parse(block, take) {
  let kind = "message";
  let id = null;
  let data = "";
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("id:")) id = Number(line.slice(3));
    else if (line.startsWith("data:")) data += line.slice(5);
  }
  if (!data) return;
  const row = JSON.parse(data);
  take(kind, { ...row, seq: row.seq ?? id });
}

/**
 * Follow everything after `after` until the connection ends, is silent, or `signal` ends it.
 *
 * `row(kind, row)` sees each row once, in order; `live()` is called when the stream is open. Throws ApiError if it is refused.
 */
export async function follow(after, { row, live }, signal) {
  let last = after;
  const take = (kind, body) => {
    if (!(body.seq > last)) return;
    last = body.seq;
    row(kind, body);
  };
  const abort = new AbortController();
  let silence = setTimeout(() => abort.abort(), SILENCE_MS);
  const alive = () => {
    clearTimeout(silence);
    silence = setTimeout(() => abort.abort(), SILENCE_MS);
  };
  try {
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(last), ...bearer(viewKey()) };
    const response = await fetch("/v1/stream", { headers, signal: AbortSignal.any([abort.signal, signal]), cache: "no-store" });
    if (!response.ok) throw new ApiError(response.status, `the stream was refused (${response.status})`);
    live();
    await read(response.body, take, alive);
  } finally {
    clearTimeout(silence);
    abort.abort();
  }
}

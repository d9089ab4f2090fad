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
export const forgetViewKey = () => sessionStorage.removeItem(KEY);
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

export const bearer = (token) => (token ? { Authorization: `Bearer ${token}` } : {});

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

/** POST `body` as JSON with the admin's token. Throws ApiError, TypeError. */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json", ...bearer(adminToken()) };
  const signal = AbortSignal.timeout(DEADLINE_MS);
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
}

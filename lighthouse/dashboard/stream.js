// Server-sent events over fetch, because EventSource cannot send an Authorization header.
import { ApiError, bearer, viewKey } from "./api.js";

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

// Server-sent events over fetch, because EventSource cannot send an Authorization header.
import { ApiError, bearer, viewKey } from "./api.js";

const FIRST_MS = 250;
const LONGEST_MS = 10_000;
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
 * Follow everything after `after`; reconnects with the last number it saw until `stop()`.
 *
 * `on.row(kind, row)` sees each row once, in order. `on.state(name, why)` hears connecting, live, reconnecting and
 * refused. `on.again(last)` may say, before a reconnect, from which number to go on.
 */
export function follow(after, on) {
  let last = after;
  let stopped = false;
  let abort = new AbortController();
  let wake = () => {};

  const take = (kind, row) => {
    if (!(row.seq > last)) return;
    last = row.seq;
    on.row(kind, row);
  };

  async function once() {
    abort = new AbortController();
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    const alive = () => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), SILENCE_MS);
    };
    try {
      const headers = { Accept: "text/event-stream", "Last-Event-ID": String(last), ...bearer(viewKey()) };
      const response = await fetch("/v1/stream", { headers, signal: abort.signal, cache: "no-store" });
      if (!response.ok) throw new ApiError(response.status, `the stream was refused (${response.status})`);
      on.state("live", "");
      await read(response.body, take, alive);
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
  }

  async function loop() {
    for (let pause = FIRST_MS; !stopped; pause = Math.min(pause * 2, LONGEST_MS)) {
      const began = performance.now();
      try {
        await once();
      } catch (error) {
        if (stopped) return;
        if (error.status === 401) return on.state("refused", "the key was refused");
      }
      if (stopped) return;
      if (performance.now() - began > LONGEST_MS) pause = FIRST_MS;
      on.state("reconnecting", "the lighthouse does not answer");
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, pause * (0.75 + Math.random() / 2));
      });
      try {
        last = (await on.again?.(last)) ?? last;
      } catch {
        // it is still away: the next round finds out again
      }
    }
  }

  const hurry = () => wake();
  addEventListener("online", hurry);
  loop();
  return {
    stop() {
      stopped = true;
      removeEventListener("online", hurry);
      abort.abort();
      wake();
    },
  };
}

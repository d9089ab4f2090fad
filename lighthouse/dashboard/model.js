// Keeps the overview true: the first answer, then the stream; the overview again when lanes may have changed.
import { follow, get } from "./api.js";
import { extended } from "./series.js";
import { extentOf, store, windowOf } from "./store.js";

const BETWEEN_MS = 1000; // between two overviews
const STALE_MS = 10_000; // ages, totals and ends of lanes drift without events
const FAR = 5000; // so many rows behind, a new overview is cheaper than the rows
const FIRST_MS = 250; // before a connection is tried again; it doubles
const LONGEST_MS = 10_000;
const listeners = new Set();
let wake = () => {}; // has the next try come at once
let life = 0; // counts starts and stops, so that what is left of an earlier one ends itself
let flight = new AbortController();
let flying = false; // an overview is asked for
let timer = null;
let due = Infinity; // performance.now() at which the next one is to be asked for
let asked = -Infinity;

/** Be called with each event row that arrives live, and with null when the log has to be read anew. */
export function onEvent(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const tell = (row) => listeners.forEach((listener) => listener(row));

function query(state) {
  const points = Math.max(200, Math.min(1200, Math.round(innerWidth * 0.75)));
  const zoomed = state.zoom !== null || state.span !== null;
  const [start, end] = zoomed ? windowOf(state) : [null, null];
  return { at: state.at, start, end: state.zoom ? end : null, points };
}

async function fetchOverview() {
  asked = performance.now();
  const mine = life;
  const overview = await get("/v1/overview", query(store.get()), flight.signal);
  if (mine !== life) throw new DOMException("overtaken", "AbortError");
  store.set({ overview, received: performance.now() });
  return overview;
}

/** Ask for the overview `between` ms after the last time, or now; one at a time, and the newest wish wins. */
export function refresh(between = BETWEEN_MS) {
  due = Math.min(due, asked + between);
  if (flying) return;
  clearTimeout(timer);
  timer = setTimeout(ask, Math.max(0, due - performance.now()));
}

async function ask() {
  due = Infinity;
  flying = true;
  const mine = life;
  try {
    await fetchOverview();
  } catch (error) {
    if (mine === life && error.status === 401) refused(error);
    else if (mine === life) store.set({ trouble: error.message });
  } finally {
    flying = false;
    if (mine === life && due < Infinity) refresh(due - asked);
  }
}

function refused(error) {
  stop();
  store.set({ connection: "refused", trouble: error.message, overview: null });
}

function committed(row) {
  const { overview, zoom } = store.get();
  if (!overview) return;
  const { step, epoch, loss, lr, lr_scale, step_s, units = null, units_wanted = null, contributors } = row;
  const told = { step, epoch, loss, lr, lr_scale, step_s, units, units_wanted, contributors, healthy: contributors.length };
  const series = zoom ? overview.series : extended(overview.series, row);
  store.set({ overview: { ...overview, head: { ...overview.head, ...told }, series } });
  if (series.t.length > 2400) refresh();
}

function arrived(kind, row) {
  if (kind === "commit") return committed(row);
  if (kind === "logged") return refresh();
  tell(row);
  refresh();
}

/** Show the job, and every row that comes, until `stop`: an overview, then the stream, and again when that ends. Does not throw. */
export async function start() {
  stop();
  const mine = life;
  let last = null; // number of the newest row that was seen
  store.set({ connection: "connecting", trouble: "" });
  const row = (kind, body) => {
    last = body.seq;
    arrived(kind, body);
  };
  const live = () => store.set({ connection: "live", trouble: "" });
  for (let pause = FIRST_MS; ; pause = Math.min(pause * 2, LONGEST_MS)) {
    const began = performance.now();
    try {
      const { job, seq } = await fetchOverview();
      if (!job.live) {
        const whole = extentOf(store.get());
        return store.set({ connection: "replay", whole, at: whole[1], trouble: "" });
      }
      // A journal that was made anew, or one far ahead, is read as an overview and not row by row.
      if (last !== null && (seq < last || seq - last >= FAR)) {
        tell(null);
        last = null;
      }
      last ??= seq;
      await follow(last, { row, live }, flight.signal);
    } catch (error) {
      if (mine === life && error.status === 401) return refused(error);
    }
    if (mine !== life) return undefined;
    if (performance.now() - began > LONGEST_MS) pause = FIRST_MS;
    store.set({ connection: "reconnecting", trouble: "the lighthouse does not answer" });
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, pause * (0.75 + Math.random() / 2));
    });
    if (mine !== life) return undefined;
  }
}

addEventListener("online", () => wake());

function stop() {
  life += 1;
  wake();
  flight.abort();
  flight = new AbortController();
  clearTimeout(timer);
  due = Infinity;
}

setInterval(() => {
  const { connection, replica } = store.get();
  if (connection === "live" && !document.hidden) refresh(replica === null ? STALE_MS : 2 * BETWEEN_MS);
}, 2000);

/** Zoom to [start, end] (Unix s), or back to everything with null. */
export function zoom(range) {
  if (range && !(range[1] - range[0] >= 0.05)) return;
  store.set({ zoom: range, span: null });
  refresh(150);
}

/** Follow the last `seconds`; null: the whole job. */
export function showLast(seconds) {
  store.set({ zoom: null, span: seconds });
  refresh(150);
}

/** Replay: show the job as it was at `t`, Unix s. */
export function moveTo(t) {
  store.set({ at: t });
  refresh(120);
}

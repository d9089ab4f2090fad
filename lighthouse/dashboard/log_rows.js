// The rows of the log: which of them are held, a stretch of the journal that is bounded at both ends; and how one is drawn.
import { html } from "./html.js";
import { store } from "./store.js";
import { clockMs, day, short } from "./time.js";

export const PAGE = 100;
export const HELD = 800;

export const EMPTY = { rows: [], older: false, newer: false };

/** Whether a row passes the filter; the same rule as the lighthouse's for rows that come live. */
export function passes(row, { replica, event, text }) {
  if (replica !== "" && row.replica !== Number(replica)) return false;
  if (event !== "" && row.event !== event) return false;
  return text === "" || JSON.stringify({ ...row, said: undefined, grave: undefined }).toLowerCase().includes(text.toLowerCase());
}

/** A live row as `/v1/events` would give it: what is not named is a fact. */
export function shaped(row) {
  if (row.facts) return row;
  const { seq, t, event, source, replica = null, rank = null, incarnation = null, reason = "", said = event, grave = false, ...facts } = row;
  return { seq, t, event, source, replica, rank, incarnation, reason, said, grave, facts };
}

/** `held` and `more` as one ascending list without doubles. */
export function merged(held, more) {
  const all = new Map(held.map((row) => [row.seq, row]));
  for (const row of more) all.set(row.seq, row);
  return [...all.values()].sort((a, b) => a.seq - b.seq);
}

/** With a page of older rows; the newest are let go where there are too many. */
export function withOlder(held, page, full) {
  const rows = merged(held.rows, page);
  return { rows: rows.slice(0, HELD), older: full, newer: held.newer || rows.length > HELD };
}

/** With a page of newer rows, or with live ones; the oldest are let go where there are too many. */
export function withNewer(held, page, full) {
  const rows = merged(held.rows, page);
  return { rows: rows.slice(-HELD), older: held.older || rows.length > HELD, newer: full };
}

function worded(name, value) {
  if (name === "bytes" && Number.isFinite(value)) return `${short(value)}B`;
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(4)));
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function Row({ row, named }) {
  const facts = Object.entries(row.facts ?? {}).map(([name, value]) => `${name} ${worded(name, value)}`).join("  ");
  const kind = row.grave ? "grave" : row.source === "admin" ? "ordered" : "";
  const rank = row.rank === null || row.rank === undefined ? "" : `.${row.rank}`;
  return html`
    <li class=${["row", kind, named && "named"].filter(Boolean).join(" ")} data-seq=${row.seq} aria-current=${named ? "true" : null}>
      <a class="num when" href=${`#event=${row.seq}`} title=${`Event ${row.seq}: link to it`}><span class="day">${day(row.t)} </span>${clockMs(row.t)}</a>
      ${row.replica === null || row.replica === undefined
        ? html`<span class="who quiet">${row.source}</span>`
        : html`<button type="button" class="who num" title=${`from the ${row.source}`} onClick=${() => store.set({ replica: row.replica })}>r${row.replica}${rank}</button>`}
      <span class="what" title=${row.event}>${row.said}</span>
      <span class="why">${row.reason !== row.said && row.reason} <span class="facts-of"><b>${row.event}</b>  ${facts}</span></span>
    </li>
  `;
}

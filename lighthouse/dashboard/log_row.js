// One event in a line; the one that the address names is open.
import { html } from "./html.js";
import { store } from "./store.js";
import { clockMs, day, short } from "./time.js";

const GRAVE = new Set([
  "FailureInjected", "ProcessExited", "ReplicaExited", "RingBroken", "ReplicaLost", "ReplicaStalled", "RankEnded",
  "FetchRejected", "SnapshotCorrupt", "SnapshotsNotForgotten", "StateCorrupt", "StateDiverged", "StateAgentLost",
  "ForkServerLost", "LogLinesLost", "CheckpointFailed", "CheckpointWriterLost", "CheckpointMissing", "StepSkipped",
  "BatchGivenUp", "JobHalted", "HeadRolledBack", "RewindOrdered", "ReplicaExcluded", "EdgeBroken", "LeaseEnded", "StoreBehind", "StoreFailed", "LighthouseExited",
  "LighthouseSilent", "LighthouseFailed", "LighthouseDeposed",
]);

const ORDERLY = new Set(["exit 0", "done", "stopped", "drained"]); // how processes end that were meant to end

/** Whether an event is a failure: the orderly end of a process is none. */
export const grave = (row) => GRAVE.has(row.event) && !ORDERLY.has(row.facts?.kind);

function worded(name, value) {
  if (name === "bytes" && Number.isFinite(value)) return `${short(value)}B`;
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(4)));
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function Row({ row, named }) {
  const facts = Object.entries(row.facts ?? {}).map(([name, value]) => `${name} ${worded(name, value)}`).join("  ");
  const kind = grave(row) ? "grave" : row.source === "admin" ? "ordered" : "";
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

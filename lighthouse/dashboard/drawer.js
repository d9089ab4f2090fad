// Everything about one replica, and what may be done to it.
import { get } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { inWords } from "./loads.js";
import { merged, Row, shaped } from "./log_rows.js";
import { onEvent } from "./model.js";
import { copiesOf, hostsOf, RUNGS, STATES, Swatch } from "./states.js";
import { nowOf, store, useStore } from "./store.js";
import { clock, count, day, short, span } from "./time.js";
import { told } from "./waterfall.js";

const RECENT = 20;

function useRecent(replica, ceiling) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    let gone = false;
    const take = (more) => gone || setRows((now) => merged(now, more).slice(-RECENT));
    const read = () =>
      get("/v1/events", { replica, limit: RECENT, before: ceiling === null ? null : ceiling + 1 }).then(
        ({ events }) => take(events),
        () => {}, // the connection state says so already
      );
    setRows([]);
    read();
    const unfollow = onEvent((row) => (row === null ? read() : row.replica === replica && take([shaped(row)])));
    return () => {
      gone = true;
      unfollow();
    };
  }, [replica, ceiling]);
  return rows;
}

export function Drawer() {
  const id = useStore((s) => s.replica);
  const found = useStore((s) => s.overview.replicas.find((r) => r.replica === s.replica) ?? null);
  return id === null || !found ? null : html`<${Open} key=${id} replica=${found} />`;
}

function Open({ replica }) {
  const panel = useRef(null);
  const state = store.get();
  const live = useStore((s) => s.overview.job.live);
  const failures = useStore((s) => s.overview.failures);
  const ceiling = useStore((s) => (s.at === null ? null : s.overview.seq));
  const rows = useRecent(replica.replica, ceiling);
  const close = () => store.set({ replica: null });
  useEffect(() => {
    const before = document.activeElement;
    panel.current.focus();
    return () => before?.isConnected && before.focus();
  }, []);
  const key = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  };
  const mine = failures.filter((f) => f.replica === replica.replica).sort((a, b) => b.t - a.t);
  return html`
    <aside class="drawer" ref=${panel} tabindex="-1" aria-labelledby="drawer" onKeyDown=${key}>
      <header>
        <h2 id="drawer">Replica ${replica.replica}</h2>
        <span class="state"><${Swatch} state=${replica.state} width=${22} /> ${replica.state}</span>
        ${replica.straggler && html`<span class="tag warn">straggler</span>`}${replica.drained && html`<span class="tag">drained</span>`}${replica.pause && html`<span class="tag">pauses: ${replica.pause}</span>`}
        <span class="grow" /><button type="button" class="quiet-button" onClick=${close}>close</button>
      </header>
      <p class="quiet">${STATES[replica.state]?.about ?? ""}${replica.reason && html`<br />${replica.reason}`}</p>
      <dl class="details">
        <div><dt>since</dt><dd class="num">${replica.since === null ? "–" : `${day(replica.since)} ${clock(replica.since)}, ${span(nowOf(state) - replica.since)}`}</dd></div>
        <div><dt>step</dt><dd class="num">${count(replica.step)}</dd></div>
        <div><dt>incarnation</dt><dd class="num">${replica.incarnation || "–"} <span class="quiet">(${replica.incarnations} so far)</span></dd></div>
        ${replica.width < state.overview.job.ranks && html`<div><dt>ranks</dt><dd class="num">${replica.width} of ${state.overview.job.ranks}</dd></div>`}
        <div><dt>hosts</dt><dd>${hostsOf(replica) || "–"}</dd></div>
        ${replica.copies.length > 0 && html`<div><dt>copies of its shards</dt><dd>${copiesOf(replica)}</dd></div>`}
        <div><dt>state from</dt><dd><${Restored} restored=${replica.restored} /></dd></div>
        <div><dt>step time, busy</dt><dd class="num">${span(replica.step_s)}, ${span(replica.busy_s)}</dd></div>
      </dl>
      ${live && html`<${Orders} replica=${replica} />`}
      <h3>Ranks</h3><${Ranks} ranks=${replica.ranks} />
      <h3>Failures</h3>
      ${mine.length ? html`<ul class="failures">${mine.slice(0, 8).map((f) => html`<li key=${f.seq}><button type="button" onClick=${() => store.set({ failure: f.seq })}><span class="num quiet">${day(f.t)} ${clock(f.t)}</span><span class="kind wide">${told(f)}</span><span class="num right">${f.rejoin_s === null ? "–" : span(f.rejoin_s)}</span></button></li>`)}</ul>` : html`<p class="quiet">None.</p>`}
      <h3>Last events</h3>
      <ol class="recent">${[...rows].reverse().map((row) => html`<${Row} key=${row.seq} row=${row} />`)}</ol>
    </aside>
  `;
}

function Restored({ restored }) {
  if (!restored) return "–";
  const { rung, hosts, step, bytes, seconds, lost_steps: lost } = restored;
  const named = rung !== "agent" && hosts.length ? ` (${hosts.slice(0, 3).join(", ")}${hosts.length > 3 ? ", …" : ""})` : "";
  const cost = [bytes && `${short(bytes)}B`, seconds !== null && `in ${span(seconds)}`, lost !== null && `${count(lost)} ${lost === 1 ? "step" : "steps"} lost`];
  return html`${RUNGS[rung]}${named}, <span class="num">step ${step === null ? "–" : count(step)},</span> <span class="num quiet">${cost.filter(Boolean).join(", ")}</span>`;
}

function Ranks({ ranks }) {
  if (!ranks.length) return html`<p class="quiet">No rank reports.</p>`;
  return html`
    <table class="ranks">
      <thead><tr><th>rank</th><th>host</th><th>pid</th><th>progress</th><th>last beat</th></tr></thead>
      <tbody>
        ${ranks.map((r) => [r, inWords(r.load)]).map(([r, load]) => html`<tr key=${r.rank}><td class="num">${r.rank}</td><td class="host">${r.host}</td><td class="num">${r.pid}</td><td class="num">${count(r.progress)}</td><td class="num">${r.age_s === null ? "–" : span(r.age_s)}</td></tr>${load && html`<tr class="load"><td /><td colspan="4" class="host num">${load}</td></tr>`}`)}
      </tbody>
    </table>
  `;
}

function Orders({ replica }) {
  const notice = useStore((s) => s.notice);
  const ask = (action) => store.set({ asked: { action, replica: replica.replica }, notice: null });
  return html`
    <div class="orders" role="group" aria-label="Actions">
      <button type="button" class="danger" onClick=${() => ask("evict")}>evict</button>
      ${replica.drained ? html`<button type="button" onClick=${() => ask("undrain")}>undrain</button>` : html`<button type="button" onClick=${() => ask("drain")}>drain</button>`}
      <button type="button" onClick=${() => ask("checkpoint")}>checkpoint now</button>
    </div>
    ${notice && html`<p class=${`notice ${notice.good ? "" : "bad"}`} role="status">${notice.text}</p>`}
  `;
}

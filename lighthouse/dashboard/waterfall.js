// Failures, newest first, and what the time of the chosen one went into.
import { html, useEffect } from "./html.js";
import { zoom } from "./model.js";
import { store, useStore } from "./store.js";
import { clock, day, span } from "./time.js";

export const PHASES = {
  detect: "until the failure was known",
  quorum: "until the others had a new epoch",
  reconnect: "until their ring stood again",
  boot: "until its processes ran",
  warm: "until model and optimizer were ready",
  check_in: "until it had a state and was back in touch",
  fetch: "until the state had arrived",
  load: "until it was in the model",
  first_step: "until it contributed again",
};
const LISTED = 100;

/** What became of a replica, and why, where that says more. */
export const told = ({ kind, said, cause }) => (!cause || cause === kind ? said : `${said}: ${cause}`);

export function Waterfall() {
  const failures = useStore((s) => s.overview.failures);
  const chosen = useStore((s) => s.failure);
  const zoomed = useStore((s) => s.zoom !== null || s.span !== null);
  const sorted = [...failures].sort((a, b) => b.t - a.t);
  const failure = sorted.find((f) => f.seq === chosen) ?? sorted[0];
  return html`
    <section class="panel recovery" aria-labelledby="recovery">
      <header><h2 id="recovery">Recovery</h2><span class="quiet num">${failures.length} ${failures.length === 1 ? "failure" : "failures"}${zoomed ? " in this time" : ""}</span></header>
      ${failure ? html`<${Phases} failure=${failure} /><${List} failures=${sorted} chosen=${failure.seq} />` : html`<p class="quiet empty">Nothing has failed.</p>`}
    </section>
  `;
}

function Phases({ failure }) {
  const end = Math.max(failure.t + 0.001, ...failure.phases.map((p) => p.t1 ?? p.t0));
  const scale = 100 / (end - failure.t);
  const around = () => zoom([failure.t - (end - failure.t) * 0.25, end + (end - failure.t) * 0.25]);
  return html`
    <div class="phases-head">
      <p><b>Replica ${failure.replica}</b>${failure.rank !== null && failure.rank !== undefined && ` rank ${failure.rank}`} <span class="quiet">${told(failure)}</span></p>
      <dl class="pair">
        <div><dt>others waited</dt><dd class="num">${span(failure.stall_s)}</dd></div>
        <div><dt>it was back after</dt><dd class="num">${failure.rejoin_s === null ? (failure.done ? "never" : "not yet") : span(failure.rejoin_s)}</dd></div>
      </dl>
    </div>
    <ol class="phases" aria-label="Phases of the recovery">
      ${failure.phases.map((phase) => {
        const left = Math.max(0, (phase.t0 - failure.t) * scale);
        const width = Math.max(0.6, ((phase.t1 ?? end) - phase.t0) * scale);
        return html`<li key=${phase.name} title=${PHASES[phase.name] ?? ""}>
          <span class="phase-name">${phase.name.replace("_", " ")}</span>
          <span class="phase-track"><span class=${`phase-bar ph-${phase.name}`} style=${{ left: `${Math.min(left, 99.4)}%`, width: `${Math.min(width, 100 - Math.min(left, 99.4))}%` }} /></span>
          <span class="phase-time num">${phase.t1 === null ? "…" : span(phase.t1 - phase.t0)}</span>
        </li>`;
      })}
    </ol>
    <p class="links"><button type="button" class="link" onClick=${around}>show on the lanes</button>
      <a class="link" href=${`#event=${failure.seq}`}>show in the log</a></p>
  `;
}

function List({ failures, chosen }) {
  useEffect(() => {
    const list = document.querySelector(".failures");
    const row = list?.querySelector('[aria-current="true"]');
    if (row && (row.offsetTop < list.scrollTop || row.offsetTop + row.offsetHeight > list.scrollTop + list.clientHeight)) list.scrollTop = row.offsetTop - 40;
  }, [chosen]);
  return html`
    <ul class="failures" aria-label="Failures, newest first">
      ${failures.slice(0, LISTED).map(
        (f) => html`<li key=${f.seq}>
          <button type="button" aria-current=${f.seq === chosen} onClick=${() => store.set({ failure: f.seq })}>
            <span class="num quiet">${day(f.t)} ${clock(f.t)}</span><span class="num">r${f.replica}</span>
            <span class="kind">${f.said}</span><span class="num right">${f.rejoin_s === null ? "–" : span(f.rejoin_s)}</span>
          </button>
        </li>`,
      )}
    </ul>
  `;
}

// Who waits for whom: who keeps the job waiting and where that is, each collective that does not end, and all ranks.
import { get } from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { shaped } from "./log_rows.js";
import { onEvent } from "./model.js";
import { nowOf, store, useStore } from "./store.js";
import { clock, span } from "./time.js";

const EVERY_MS = 2000; // between two requests while the job hangs
const QUIET_S = 4; // without a step; or so many steps, if that is longer
const QUIET_STEPS = 4;
const WAITS = 12; // shown, at most
const NAMED = 8; // findings, and ranks in a line
const SUSPECTS = 4; // of a finding
const CELLS = 64; // of a replica
const STILL_S = [1.5, 5, 20]; // from here on a rank's colour is another one
const WORDS = {
  culprit: "keeps others waiting, or is slow",
  silent: "nothing is heard of it",
  absent: "others wait for it",
  waits: "waits for others",
};
const SHADES = [["goes on", "still-0"], ...STILL_S.map((s, n) => [`still for ${s} s`, `still-${n + 1}`])];

/** Whether the newest culprit that the lighthouse has found still keeps the job waiting. */
function useHangs() {
  const [newest, setNewest] = useState(null);
  useEffect(() => {
    let gone = false;
    const take = (row) => gone || setNewest((now) => (now && now.seq >= row.seq ? now : shaped(row)));
    const read = () => {
      setNewest(null);
      get("/v1/events", { event: "CulpritFound", limit: 1 }).then(({ events }) => events.forEach(take), () => {});
    };
    read();
    const unfollow = onEvent((row) => (row === null ? read() : row.event === "CulpritFound" && take(row)));
    return () => {
      gone = true;
      unfollow();
    };
  }, []);
  return newest !== null && !newest.facts.over;
}

/** Whether the overview shows no step for long. */
function isQuiet(state) {
  const { job, head, series } = state.overview;
  if (!job.live || job.ended || job.finished || state.zoom || !series.t.length) return false;
  return nowOf(state) - series.t.at(-1) > Math.max(QUIET_S, QUIET_STEPS * (head.step_s ?? 0));
}

export function Diagnosis() {
  const open = useStore((s) => s.diagnosis);
  const quiet = useStore(isQuiet);
  const hangs = useHangs();
  const [shown, setShown] = useState(null); // the newest answer
  const [trouble, setTrouble] = useState("");
  const ails = hangs || quiet;
  const stopped = shown?.stopped ?? false;
  useEffect(() => {
    if (hangs || stopped) store.set({ diagnosis: true });
  }, [hangs, stopped]);
  useEffect(() => {
    if (!ails && !open) setShown(null);
    if (!open && (!ails || stopped)) return undefined; // stopped: it was closed by hand
    const flight = new AbortController();
    let timer = null;
    const ask = async () => {
      try {
        if (!document.hidden) setShown(await get("/v1/diagnosis", {}, flight.signal));
        setTrouble("");
      } catch (error) {
        if (!flight.signal.aborted) setTrouble(error.message);
      }
      if (ails && !flight.signal.aborted) timer = setTimeout(ask, EVERY_MS);
    };
    ask();
    return () => {
      flight.abort();
      clearTimeout(timer);
    };
  }, [open, ails]);
  return open && html`<${Panel} shown=${shown} trouble=${trouble} />`;
}

/** Opens and closes the panel. */
export function DiagnosisSwitch() {
  const open = useStore((s) => s.diagnosis);
  return html`<button type="button" id="who-waits" class="quiet-button" aria-expanded=${open} onClick=${() => store.set({ diagnosis: !open })}>who waits</button>`;
}

function close() {
  store.set({ diagnosis: false });
  document.getElementById("who-waits").focus();
}

function Panel({ shown, trouble }) {
  return html`
    <section class="panel diagnosis" aria-labelledby="diagnosis">
      <header>
        <h2 id="diagnosis">Who waits for whom</h2>
        ${shown && html`<span class="quiet num">${since(shown)}, at ${clock(shown.t)}</span>`}
        <button type="button" class="quiet-button" aria-label="close who waits for whom" onClick=${close}>close</button>
      </header>
      ${trouble && html`<p class="notice bad" role="alert">${trouble}</p>`}
      ${shown && html`<div class="diagnosed"><div><p class="verdict" role="status">${verdict(shown)}</p><${Findings} shown=${shown} /><${Waits} waits=${shown.waits} /></div><${Ranks} ranks=${shown.ranks} /></div>`}
    </section>
  `;
}

function since({ quiet_s: quiet, stopped, typical_s: usual }) {
  if (quiet === null) return "no step yet";
  return stopped ? `no step for ${span(quiet)}, one takes ${span(usual)}` : `a step takes ${span(usual)}`;
}

function verdict({ stopped, pauses, findings, waits }) {
  const pause = Object.entries(pauses).map(([replica, what]) => `replica ${replica} pauses: ${what}`);
  if (pause.length) return pause.slice(0, NAMED).join("; ");
  if (!stopped) return findings.length ? "nobody waits, but not all are as fast as the others" : "nobody waits";
  return findings.length || waits.length ? "the job has stopped" : "the job has stopped, and no rank tells that it waits";
}

function More({ all, most, what }) {
  return all > most && html`<li class="quiet">and ${all - most} more ${what}</li>`;
}

function Findings({ shown: { findings, failures } }) {
  const sorted = [...findings].sort((a, b) => a.suspects.length - b.suspects.length); // the most certain first
  return html`
    <ul class="findings" aria-label="Who keeps the job waiting">
      ${sorted.slice(0, NAMED).map(
        ({ kind, why, suspects }) => html`<li key=${kind + why}>
          <p><b class="bad">${kind}</b> ${why}</p>
          ${suspects.slice(0, SUSPECTS).map((s) => html`<${Suspect} key=${s.name} suspect=${s} />`)}
          ${suspects.length > SUSPECTS && html`<p class="quiet">and ${suspects.length - SUSPECTS} more ranks</p>`}
        </li>`,
      )}
      <${More} all=${findings.length} most=${NAMED} what="findings" />
      ${failures.slice(0, NAMED).map((f) => html`<li key=${f.seq}>replica ${f.replica}: ${f.said}${f.cause && `, ${f.cause}`}</li>`)}
    </ul>
  `;
}

function Suspect({ suspect: { name, replica, rank, host, pid, still_s: still, doing, stack } }) {
  return html`
    <p class="suspect">
      <button type="button" class="link" onClick=${() => store.set({ replica })}>replica ${replica} rank ${rank}</button>
      <span>on <b>${host}</b>, pid <b class="num">${pid}</b>${doing && `, ${doing}`}</span>
      <span class="quiet num">still for ${span(still)}</span>
    </p>
    ${stack.length > 0 && html`<pre role="group" tabindex="0" aria-label=${`Stack of ${name}, innermost first`}>${stack.join("\n")}</pre>`}
  `;
}

function names(some, all) {
  const more = all - Math.min(some.length, NAMED);
  return some.slice(0, NAMED).join(", ") + (more ? ` and ${more} more` : "");
}

function Waits({ waits }) {
  return waits.length > 0 && html`
    <ol class="waits num" aria-label="Collectives that do not end">
      ${waits.slice(0, WAITS).map((w) => html`<li key=${`${w.group} ${w.number}`}>
        <b>${names(w.waiting, w.waiting_in_all)}</b> ${w.waiting_in_all === 1 ? "waits" : "wait"} in ${w.op || "collective"}, number ${w.number} of ${w.group} for <b>${names(w.absent, w.absent_in_all) || "each other"}</b>
      </li>`)}
      <${More} all=${waits.length} most=${WAITS} what="collectives" />
    </ol>
  `;
}

const told = ([, rank, still, age, word]) =>
  `rank ${rank}: ${word && `${WORDS[word]}, `}${word === "silent" ? `for ${span(age)}` : still < STILL_S[0] ? "goes on" : `still for ${span(still)}`}`;

/** Which rank each cell of a replica shows: of several, the worst; undefined: it was never heard. */
export function cellsOf(ranks, width) {
  const fold = Math.ceil(width / CELLS);
  const cells = new Array(Math.ceil(width / fold)).fill(undefined);
  for (const rank of ranks) cells[Math.floor(rank[1] / fold)] ??= rank; // the worst come first
  return cells;
}

function Ranks({ ranks }) {
  const width = useStore((s) => s.overview.job.ranks);
  if (!ranks.length) return null;
  const replicas = Map.groupBy(ranks, ([replica]) => replica);
  const fold = Math.ceil(width / CELLS);
  return html`
    <div class="stillness">
      <ul class="legend" aria-label="How long ranks stand still">
        ${[...SHADES, ...Object.keys(WORDS).map((word) => [word, `is-${word}`])].map(([label, kind]) => html`<li key=${label} title=${WORDS[label]}><i class=${`cell ${kind}`} />${label}</li>`)}
        ${fold > 1 && html`<li>a cell is the worst of ${fold} ranks</li>`}
      </ul>
      <ul class="replicas scroll" aria-label="Ranks, by replica">
        ${[...replicas].sort(([a], [b]) => a - b).map(([replica, mine]) => html`<li key=${replica}>
          <button type="button" aria-label=${`Replica ${replica}: ${mine.filter((r) => r[4]).slice(0, NAMED).map(told).join("; ") || "nothing to see"}`} onClick=${() => store.set({ replica })}>
            <span class="lane-id">r${replica}</span>
            ${cellsOf(mine, width).map((r, n) => html`<i key=${n} class=${r ? `cell still-${STILL_S.filter((s) => r[2] >= s).length} is-${r[4]}` : "cell"} title=${r ? told(r) : `rank ${n * fold}: was never heard`} />`)}
          </button>
        </li>`)}
      </ul>
    </div>
  `;
}

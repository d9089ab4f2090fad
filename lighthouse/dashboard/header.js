// The job in one line: what it is, how far, how fast, how well; and whether this page is up to date.
import { DiagnosisSwitch } from "./diagnosis.js";
import { html } from "./html.js";
import { store, useStore } from "./store.js";
import { count, percent, short, span } from "./time.js";

function switchTheme() {
  const theme = store.get().theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("ft.theme", theme);
  } catch {
    // storage may be forbidden; the switch then lasts as long as the page
  }
  store.set({ theme });
}

export function Connection() {
  const connection = useStore((s) => s.connection);
  const trouble = useStore((s) => s.trouble);
  return html`<span class=${`connection is-${connection}`} role="status" title=${trouble}><i aria-hidden="true" />${connection === "refused" ? "no access" : connection}</span>`;
}

export function ThemeSwitch() {
  const theme = useStore((s) => s.theme);
  const other = theme === "dark" ? "light" : "dark";
  return html`<button type="button" class="quiet-button" aria-label=${`Switch to the ${other} theme`} onClick=${switchTheme}>${other}</button>`;
}

function Fact({ label, children, note, warn, about }) {
  return html`<div class=${`fact ${warn ? "warn" : ""}`} title=${about}><dt>${label}</dt><dd class="num">${children}${note && html` <small>${note}</small>`}</dd></div>`;
}

/** On how many hosts the newest state is, in the words of the replicas. */
function Copies({ protection: { word, copies, apart, why } }) {
  const about = `the newest state: each shard is on so many ${apart}s, healthy replicas included${why && `; ${why}`}`;
  return html`<${Fact} label="copies" about=${about} warn=${word === "unprotected"} note=${word === "unprotected" ? "" : word}>${word === "unprotected" ? word : copies}<//>`;
}

export function Header() {
  const { job, head, effective, replicas } = useStore((s) => s.overview);
  const share = job.steps ? Math.min(1, head.step / job.steps) : 0;
  const left = head.steps_per_s > 0 && !job.finished ? (job.steps - head.step) / head.steps_per_s : null;
  const { units, units_wanted: wanted } = head;
  const spare = replicas.filter((replica) => replica.state === "standby").length;
  const halted = job.halted || (job.finished ? "finished" : "");
  return html`
    <header class="top">
      <div class="title">
        <${Connection} />
        <h1>${job.name}</h1>
        ${halted && html`<span class=${`tag ${job.halted ? "warn" : ""}`}>${job.halted ? `halted: ${halted}` : halted}</span>`}
        <span class="grow" />
        ${job.live && html`<${DiagnosisSwitch} /><button type="button" class="quiet-button" onClick=${() => store.set({ asked: { action: "checkpoint" } })}>checkpoint now</button>`}
        <${ThemeSwitch} />
      </div>
      <dl class="facts">
        <${Fact} label="step" note=${`of ${count(job.steps)}`}>${count(head.step)}<//>
        <${Fact} label="left" about="time to the last step, at the present rate">${left === null ? "–" : span(left)}<//>
        <${Fact} label="rate" note="steps/s">${short(head.steps_per_s)}<//>
        <${Fact} label="tokens" note="/s">${short(head.tokens_per_s)}<//>
        <${Fact} label="healthy" about="replicas that contribute to a step" note=${`of ${job.total}${spare ? `, ${spare} on standby` : ""}`} warn=${head.healthy < job.total && !job.finished}>${head.healthy}<//>
        ${job.protection.word && html`<${Copies} protection=${job.protection} />`}
        <${Fact} label="units" about="micro-batches of one rank in the newest step, of those in a step to which all replicas contribute" note=${wanted && `of ${count(wanted)}`} warn=${units < wanted && !job.finished}>${units === null ? "–" : count(units)}<//>
        <${Fact} label="effective time" about="share of the time that trained the model">${percent(effective.wall_clock)}<//>
        <${Fact} label="epoch" about="number of the present membership: a new one begins when a replica leaves or joins">${count(head.epoch)}<//>
        <${Fact} label="loss">${Number.isFinite(head.loss) ? head.loss.toFixed(4) : "–"}<//>
        <${Fact} label="learning rate" about="of the newest step; lr scale is its factor while fewer replicas contribute (lr.intervention)" note=${`lr scale ${short(head.lr_scale)}`}>${short(head.lr)}<//>
      </dl>
      <div class="progress" role="progressbar" aria-label="Progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.round(share * 100)}>
        <span style=${{ width: `${share * 100}%` }} />
      </div>
    </header>
  `;
}

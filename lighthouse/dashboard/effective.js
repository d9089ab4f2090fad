// Where the time went: one bar, and its seconds in a table.
import { html } from "./html.js";
import { useStore } from "./store.js";
import { percent, span } from "./time.js";

const CAUSES = {
  startup: "before the first step",
  detect: "failure not seen yet",
  quorum: "waiting for an epoch",
  reconnect: "building the ring",
  fetch: "waiting for state",
  missing: "fewer contributors",
  replay: "steps done twice",
  ftar: "exposed all-reduce",
  commit: "agreeing on the step",
  other: "none of these",
};

export function Effective() {
  const effective = useStore((s) => s.overview.effective);
  const { wall_s: wall, useful_s: useful, lost_s: lost } = effective;
  const causes = Object.entries(lost).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]);
  const parts = [["useful", useful], ...causes];
  return html`
    <section class="panel effective" aria-labelledby="effective">
      <header><h2 id="effective">Effective training time</h2><span class="quiet num">of ${span(wall)}</span></header>
      <dl class="shares">
        <div title="share of the time since the job began that trained the model; a step that was done twice counts twice"><dt>wall clock</dt><dd class="num big">${percent(effective.wall_clock, 2)}</dd></div>
        <div title="share of the time that failures alone left: t / (t + lost), where t is the time that trained"><dt>renewal</dt><dd class="num">${effective.renewal === null ? "–" : percent(effective.renewal, 2)}</dd></div>
        <div title="as wall clock; a step that was done twice counts once"><dt>with replay</dt><dd class="num">${percent(effective.with_replay, 2)}</dd></div>
      </dl>
      <div class="stack" role="img" aria-label=${`Useful ${percent(useful / wall)}; the table below has the rest`}>
        ${parts.map(([name, s]) => html`<span key=${name} class=${`part l-${name}`} style=${{ flexGrow: `${s}` }} title=${`${name} ${span(s)}`} />`)}
      </div>
      <table class="causes">
        <thead class="hidden"><tr><th>cause</th><th>share</th><th>time</th><th>percent</th></tr></thead>
        <tbody>
          <tr><th scope="row"><i class="dot l-useful" />useful</th><td class="about">full steps</td><td class="num">${span(useful)}</td><td class="num quiet">${percent(useful / wall)}</td></tr>
          ${causes.map(
            ([name, s]) => html`<tr key=${name}>
              <th scope="row"><i class=${`dot l-${name}`} />${name}</th>
              <td class="about" title=${CAUSES[name] ?? ""}>${CAUSES[name] ?? ""}</td>
              <td class="num">${span(s)}</td><td class="num quiet">${percent(s / wall, 2)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>
  `;
}

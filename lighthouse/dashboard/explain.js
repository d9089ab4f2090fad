// The words beside the pointer, or beside the place that the keyboard has reached, on the lanes.
import { html } from "./html.js";
import { STATES } from "./states.js";
import { nowOf, store } from "./store.js";
import { Swatch } from "./swatch.js";
import { clock, day, span } from "./time.js";
import { told } from "./waterfall.js";

export function Explained({ x, y, found, width }) {
  const state = store.get();
  const replica = found.row === null ? null : state.picture.lanes[found.row]?.replica;
  const style = { transform: `translate(${x > width / 2 ? `calc(${x - 14}px - 100%)` : `${x + 14}px`}, ${y + 14}px)` };
  return html`
    <div class="tip" role="status" style=${style}>
      <p class="tip-when">${day(found.t)} ${clock(found.t)}</p>
      ${found.segment && html`<${Segment} replica=${replica} segment=${found.segment} now=${nowOf(state)} />`}
      ${found.failure && html`<p><b class="bad">Failure</b> of replica ${found.failure.replica}: ${told(found.failure)}</p>`}
      ${found.epoch && html`<p><b>Epoch ${found.epoch.epoch}</b>, ${found.epoch.members.length} members: ${found.epoch.reason}</p>`}
      ${found.outage && html`<p><b class="bad">The lighthouse was away</b> for ${span((found.outage[1] ?? nowOf(state)) - found.outage[0])}</p>`}
    </div>
  `;
}

function Segment({ replica, segment: [from, to, name], now }) {
  return html`
    <p class="tip-state"><${Swatch} state=${name} /> <b>Replica ${replica}</b> ${name}</p>
    <p class="quiet">${STATES[name]?.about ?? ""}</p>
    <p class="num">${clock(from)} – ${to === null ? "now" : clock(to)}, ${span((to ?? now) - from)}</p>
  `;
}

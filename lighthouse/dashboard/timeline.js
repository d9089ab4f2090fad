// Lanes and charts in one panel, because they share their time axis, and what to show of it.
import { Charts } from "./charts.js";
import { html } from "./html.js";
import { Lanes } from "./lanes.js";
import { showLast, zoom } from "./model.js";
import { STATES, Swatch } from "./states.js";
import { store, useStore, windowOf } from "./store.js";
import { clock, day, span } from "./time.js";

const SPANS = [[900, "15 min"], [3600, "1 h"], [21600, "6 h"], [null, "all"]];

export function Timeline() {
  const zoomed = useStore((s) => s.zoom);
  const chosen = useStore((s) => s.span);
  const seen = useStore((s) => [...new Set(s.overview.lanes.flatMap((l) => l.segments.map((g) => g[2])))].sort().join(" "));
  return html`
    <section class="panel timeline" aria-labelledby="timeline">
      <header>
        <h2 id="timeline">Replicas</h2>
        <div class="spans" role="group" aria-label="Time shown">
          ${zoomed && html`<button type="button" class="zoomed num" title="Show everything" onClick=${() => zoom(null)}>${day(zoomed[0])} ${clock(zoomed[0])}, ${span(zoomed[1] - zoomed[0])}<span aria-hidden="true"> ×</span></button>`}
          ${SPANS.map(([s, label]) => html`<button type="button" key=${label} aria-pressed=${!zoomed && chosen === s} onClick=${() => showLast(s)}>${label}</button>`)}
        </div>
        <ul class="legend" aria-label="States">
          ${Object.keys(STATES).filter((name) => seen.split(" ").includes(name)).map((name) => html`<li key=${name} title=${STATES[name].about}><${Swatch} state=${name} />${name}</li>`)}
          <li title="a failure"><i class="mark" />failure</li><li title="a new epoch"><i class="epoch" />epoch</li>
        </ul>
      </header>
      <${Lanes} /><${Charts} />
    </section>
  `;
}

/** Keys of the whole page: + and - zoom around the middle, 0 shows everything. */
export function zoomKey(event) {
  if (event.target.closest("input, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const [start, end] = windowOf(store.get());
  const [middle, half] = [(start + end) / 2, (end - start) / 2];
  if (event.key === "+") zoom([middle - half / 2, middle + half / 2]);
  else if (event.key === "-" && store.get().zoom) zoom([middle - half * 2, middle + half * 2]);
  else if (event.key === "0") zoom(null);
  else if (event.key === "Escape" && store.get().replica !== null) store.set({ replica: null });
}

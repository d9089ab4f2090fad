// A lane per replica over time. Pointer and keyboard explain what is there; dragging zooms.
import { html, useEffect, useRef, useState } from "./html.js";
import { AXIS, draw, geometry, under } from "./lanes_draw.js";
import { zoom } from "./model.js";
import { hostsOf, STATES, Swatch } from "./states.js";
import { nowOf, store, useStore, windowOf } from "./store.js";
import { clock, day, span } from "./time.js";
import { told } from "./waterfall.js";

const LANE = 18;

/** Everything that the lanes show, read from the store. */
function shown(state) {
  const { overview } = state;
  const now = nowOf(state);
  const past = (row) => row.t <= now;
  return {
    lanes: overview.lanes,
    epochs: overview.epochs.filter(past),
    failures: overview.failures.filter(past),
    outages: overview.lighthouse.outages,
    now,
    chosen: state.failure,
    ranks: overview.job.ranks,
  };
}

export function Lanes() {
  const canvas = useRef(null);
  const frame = useRef(null);
  const line = useRef(null);
  const band = useRef(null);
  const width = useRef(0);
  const drag = useRef(null);
  const [tip, setTip] = useState(null); // {x, y, found}
  const replicas = useStore((s) => s.overview.replicas);
  const at = useRef({ row: 0, n: null });

  const geo = () => geometry(width.current, LANE, windowOf(store.get()));
  const paint = () => {
    if (width.current > 0) draw(canvas.current, geo(), shown(store.get()));
    cursor(store.get());
  };
  const cursor = (state) => {
    const x = state.cursor === null ? -1 : geo().x(state.cursor);
    const seen = x >= 0 && x <= width.current;
    line.current.style.transform = `translateX(${seen ? x : -9999}px)`;
  };

  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => {
      width.current = Math.floor(entry.contentRect.width);
      paint();
    });
    watch.observe(frame.current);
    const clock = setInterval(() => !document.hidden && store.get().at === null && paint(), 1000);
    const followed = store.follow((state, before) => {
      const same = ["overview", "zoom", "span", "at", "failure", "theme"].every((name) => state[name] === before[name]);
      if (same) cursor(state);
      else if (state.overview) paint();
    });
    return () => {
      watch.disconnect();
      clearInterval(clock);
      followed();
    };
  }, []);

  const place = (event) => {
    const box = frame.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const moved = (event) => {
    const [x, y] = place(event);
    const found = under(geo(), x, y, shown(store.get()));
    store.set({ cursor: found.t });
    setTip({ x, y, found });
    if (drag.current === null) return;
    const [from, to] = [drag.current, x].sort((a, b) => a - b);
    band.current.style.transform = `translateX(${from}px)`;
    band.current.style.width = `${to - from}px`;
  };
  const pressed = (event) => {
    if (event.pointerType === "touch") return moved(event);
    if (event.button !== 0) return;
    frame.current.setPointerCapture(event.pointerId);
    [drag.current] = place(event);
  };
  const released = (event) => {
    const from = drag.current;
    drag.current = null;
    band.current.style.width = "0";
    if (from === null) return;
    const [x, y] = place(event);
    const [a, b] = [from, x].sort((m, n) => m - n);
    if (b - a > 4) return zoom([geo().t(Math.max(0, a)), geo().t(Math.min(width.current, b))]);
    choose(under(geo(), x, y, shown(store.get())));
  };
  const choose = (found) => {
    if (found.failure) store.set({ failure: found.failure.seq });
    else if (found.row !== null) store.set({ replica: store.get().overview.lanes[found.row].replica });
  };
  const left = (event) => {
    if (event.pointerType === "touch") return;
    store.set({ cursor: null });
    setTip(null);
  };

  /** Walk: up and down through the lanes, left and right through a lane's segments. */
  const key = (event) => {
    const { lanes, now, failures } = shown(store.get());
    const [start, end] = windowOf(store.get());
    const visible = (row) => lanes[row].segments.filter(([from, to]) => (to ?? now) >= start && from <= end);
    let { row, n } = at.current;
    if (event.key === "ArrowDown") row = Math.min(lanes.length - 1, row + 1);
    else if (event.key === "ArrowUp") row = Math.max(0, row - 1);
    else if (event.key === "ArrowLeft") n = (n ?? visible(row).length) - 1;
    else if (event.key === "ArrowRight") n = (n ?? -1) + 1;
    else if (event.key === "Escape") return zoom(null);
    else if (event.key !== "Enter") return;
    event.preventDefault();
    const segments = visible(row);
    n = Math.max(0, Math.min(segments.length - 1, n ?? segments.length - 1));
    if (row !== at.current.row) n = segments.length - 1;
    at.current = { row, n };
    const segment = segments[n] ?? null;
    const t = segment ? (Math.max(segment[0], start) + Math.min(segment[1] ?? now, end)) / 2 : end;
    const reach = (list) => list.filter((f) => segment && f.t >= segment[0] - 0.5 && f.t <= (segment[1] ?? now));
    const failure = reach(failures.filter((f) => f.replica === lanes[row].replica))[0] ?? null;
    const found = { row, t, segment, failure, epoch: null, outage: null };
    if (event.key === "Enter") return choose(found);
    store.set({ cursor: t });
    setTip({ x: geo().x(t), y: AXIS + row * LANE + LANE / 2, found });
  };

  return html`
    <div class="lanes">
      <div class="lane-names" role="group" aria-label="Replicas">
        ${replicas.map(
          (r) => html`<button
            type="button" class="lane-name" key=${r.replica} title=${`Replica ${r.replica}: ${r.state}${r.pause ? `, pauses: ${r.pause}` : ""}`}
            aria-label=${`Replica ${r.replica}, ${r.state}${r.straggler ? ", a straggler" : ""}`}
            onClick=${() => store.set({ replica: r.replica })}
          ><span class="lane-id">r${r.replica}</span><${Swatch} state=${r.state} />
          ${r.straggler ? html`<span class="lane-flag">slow</span>` : html`<span class="lane-state">${r.pause ? "pauses" : r.state}</span>`}</button>`,
        )}
      </div>
      <div
        class="lane-frame" ref=${frame} tabindex="0" role="application"
        aria-label="States of the replicas over time. Arrow keys walk through lanes and states, Enter opens, Escape shows everything."
        onPointerMove=${moved} onPointerDown=${pressed} onPointerUp=${released} onPointerLeave=${left}
        onDblClick=${() => zoom(null)} onKeyDown=${key} onBlur=${left}
      >
        <canvas ref=${canvas} class="lane-canvas" />
        <div class="cursor-line" ref=${line} /><div class="drag-band" ref=${band} />
        ${tip && html`<${Explained} ...${tip} width=${width.current} />`}
      </div>
    </div>
  `;
}

/** The words beside the pointer, or beside the place that the keyboard has reached. */
function Explained({ x, y, found, width }) {
  const state = store.get();
  const replica = found.row === null ? null : state.overview.lanes[found.row]?.replica;
  const style = { transform: `translate(${x > width / 2 ? `calc(${x - 14}px - 100%)` : `${x + 14}px`}, ${y + 14}px)` };
  return html`
    <div class="tip" role="status" style=${style}>
      <p class="tip-when">${day(found.t)} ${clock(found.t)}</p>
      ${found.segment && html`<${Segment} replica=${replica} t=${found.t} segment=${found.segment} now=${nowOf(state)} />`}
      ${found.failure && html`<p><b class="bad">Failure</b> of replica ${found.failure.replica}: ${told(found.failure)}</p>`}
      ${found.epoch && html`<p><b>Epoch ${found.epoch.epoch}</b>, ${found.epoch.members.length} members: ${found.epoch.reason}</p>`}
      ${found.outage && html`<p><b class="bad">The lighthouse was away</b> for ${span((found.outage[1] ?? nowOf(state)) - found.outage[0])}</p>`}
    </div>
  `;
}

function Segment({ replica, t, segment: [from, to, name], now }) {
  const { job, lanes } = store.get().overview;
  const ranks = lanes.find((l) => l.replica === replica).widths.findLast(([since]) => since <= t)?.[1] ?? job.ranks;
  const hosts = hostsOf(store.get().overview.replicas.find((r) => r.replica === replica));
  return html`
    <p class="tip-state"><${Swatch} state=${name} /> <b>Replica ${replica}</b> ${name}</p>
    <p class="quiet">${STATES[name]?.about ?? ""}</p>
    ${ranks < job.ranks && html`<p>${ranks} of ${job.ranks} ranks</p>`}
    ${hosts && html`<p class="quiet">on ${hosts}</p>`}
    <p class="num">${clock(from)} – ${to === null ? "now" : clock(to)}, ${span((to ?? now) - from)}</p>
  `;
}

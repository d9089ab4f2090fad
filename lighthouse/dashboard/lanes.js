// A lane per replica over time. Pointer and keyboard explain what is there; dragging zooms.
import { html, useEffect, useRef, useState } from "./html.js";
import { zoom } from "./model.js";
import { BY_WEIGHT, hostsOf, inks, paint, STATES, Swatch } from "./states.js";
import { nowOf, store, useStore, windowOf } from "./store.js";
import { clock, day, span, tickLabel, ticks, tickStep } from "./time.js";
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
  const repaint = () => {
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
      repaint();
    });
    watch.observe(frame.current);
    const clock = setInterval(() => !document.hidden && store.get().at === null && repaint(), 1000);
    const followed = store.follow((state, before) => {
      const same = ["overview", "zoom", "span", "at", "failure", "theme"].every((name) => state[name] === before[name]);
      if (same) cursor(state);
      else if (state.overview) repaint();
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

// How the lanes are painted and what is under a point of them. No state of its own.

const AXIS = 20; // pixels above the first lane
const NARROWEST = { training: 0, down: 0, retrying: 1 }; // pixels, so that what is short is still seen
const WEIGHT = Object.fromEntries(BY_WEIGHT.map((state, n) => [state, n]));

/** The canvas in CSS pixels: `height` of a lane, and a scale from Unix s to x. */
function geometry(width, lane, [start, end]) {
  const perSecond = width / (end - start);
  return { width, lane, start, end, x: (t) => (t - start) * perSecond, t: (x) => start + x / perSecond };
}

function draw(canvas, geo, { lanes, epochs, failures, outages, now, chosen, ranks }) {
  const ratio = devicePixelRatio || 1;
  const height = AXIS + lanes.length * geo.lane;
  canvas.width = Math.round(geo.width * ratio);
  canvas.height = Math.round(height * ratio);
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  grid(g, geo, height, colour);
  const looks = inks(ratio);
  lanes.forEach(({ segments, widths }, row) => stretches(g, geo, byWidth(segments, widths, ranks, now), row, now, looks, ratio));
  g.fillStyle = colour("--outage");
  for (const [from, to] of outages) {
    const x0 = Math.max(0, geo.x(from));
    g.fillRect(x0, AXIS, Math.max(1, geo.x(to ?? now) - x0), height - AXIS);
  }
  const places = new Set(epochs.map((epoch) => Math.round(geo.x(epoch.t))).filter((x) => x >= 0 && x <= geo.width));
  g.fillStyle = colour("--epoch");
  g.globalAlpha = Math.min(1, Math.max(0.3, 12 / places.size)); // many of them must not hide the lanes
  for (const x of places) g.fillRect(x, AXIS - 4, 1, height - AXIS + 4);
  g.globalAlpha = 1;
  const rows = new Map(lanes.map(({ replica }, row) => [replica, row]));
  for (const failure of failures) mark(g, geo, failure, rows.get(failure.replica), failure.seq === chosen, colour);
}

function grid(g, geo, height, colour) {
  const step = tickStep(geo.start, geo.end, geo.width);
  g.font = `11px ${colour("--font")}`;
  g.textBaseline = "middle";
  for (const t of ticks(geo.start, geo.end, step)) {
    const x = Math.round(geo.x(t));
    g.fillStyle = colour("--grid");
    g.fillRect(x, AXIS - 3, 1, height);
    g.fillStyle = colour("--ink-3");
    const label = tickLabel(t, step);
    const room = g.measureText(label).width / 2;
    if (x > room && x < geo.width - room) g.fillText(label, x - room, AXIS / 2 - 1);
  }
}

/** The segments, each cut where its replica went on with another number of ranks: [from, to, state, share of its ranks]. */
function byWidth(segments, widths, ranks, now) {
  if (!widths.length) return segments;
  const steps = [[-Infinity, ranks], ...widths];
  return segments.flatMap(([from, to, state]) =>
    steps.flatMap(([t, width], n) => {
      const [a, b] = [Math.max(from, t), Math.min(to ?? now, steps[n + 1]?.[0] ?? Infinity)];
      return a < b ? [[a, b, state, width / ranks]] : [];
    }),
  );
}

function stretches(g, geo, segments, row, now, looks, ratio) {
  const y = AXIS + row * geo.lane + 2;
  const seen = segments
    .filter(([from, to]) => (to ?? now) >= geo.start && from <= geo.end)
    .sort((a, b) => (WEIGHT[a[2]] ?? 0) - (WEIGHT[b[2]] ?? 0));
  for (const [from, to, state, share = 1] of seen) {
    const x0 = Math.max(0, geo.x(from));
    const x1 = Math.min(geo.width, geo.x(Math.min(to ?? now, now)));
    const narrowest = NARROWEST[state] ?? 1.5;
    const [whole, room] = [geo.lane - 4, Math.max(2, Math.round((geo.lane - 4) * share))]; // fewer ranks: a thinner bar
    paint(g, looks[state] ?? looks.down, x0, y + whole - room, Math.max(narrowest, x1 - x0), room, ratio);
  }
}

function mark(g, geo, failure, row, chosen, colour) {
  const x = geo.x(failure.t);
  if (row === undefined || x < -5 || x > geo.width + 5) return;
  const y = AXIS + row * geo.lane + geo.lane / 2;
  const size = chosen ? 6 : 4;
  g.beginPath();
  g.moveTo(x, y - size);
  g.lineTo(x + size, y);
  g.lineTo(x, y + size);
  g.lineTo(x - size, y);
  g.closePath();
  g.fillStyle = colour(chosen ? "--accent" : "--mark");
  g.strokeStyle = colour("--surface");
  g.lineWidth = 1.5;
  g.stroke();
  g.fill();
}

/** What is under (x, y): {row, t, segment, failure, epoch, outage}, each but `t` possibly null. */
function under(geo, x, y, { lanes, epochs, failures, outages, now }) {
  const t = geo.t(x);
  const row = Math.floor((y - AXIS) / geo.lane);
  const near = (candidates, pixels) => {
    const close = candidates.map((c) => [Math.abs(geo.x(c.t) - x), c]).filter(([d]) => d <= pixels);
    return close.sort((a, b) => a[0] - b[0])[0]?.[1] ?? null;
  };
  const lane = lanes[row] ?? null;
  const failure = lane && near(failures.filter((f) => f.replica === lane.replica), 6);
  const segment = lane && segmentAt(geo, lane.segments, t, now);
  const outage = outages.find(([from, to]) => geo.x(from) - 2 <= x && x <= geo.x(to ?? now) + 2) ?? null;
  return { row: lane ? row : null, t, segment, failure, epoch: near(epochs, 3), outage };
}

/** The segment at `t`, or, where several share a pixel, the one that was painted last. */
function segmentAt(geo, segments, t, now) {
  const slack = (geo.t(1) - geo.t(0)) * 0.75;
  const close = segments.filter(([from, to]) => from - slack <= t && t <= (to ?? now) + slack);
  return close.sort((a, b) => (WEIGHT[b[2]] ?? 0) - (WEIGHT[a[2]] ?? 0))[0] ?? null;
}

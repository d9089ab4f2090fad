// How the lanes are painted and what is under a point of them. No state of its own.
import { BY_WEIGHT, inks, paint } from "./states.js";
import { tickLabel, ticks, tickStep } from "./time.js";

export const AXIS = 20; // pixels above the first lane
const NARROWEST = { training: 0, down: 0, retrying: 1 }; // pixels, so that what is short is still seen
const WEIGHT = Object.fromEntries(BY_WEIGHT.map((state, n) => [state, n]));

/** The canvas in CSS pixels: `height` of a lane, and a scale from Unix s to x. */
export function geometry(width, lane, [start, end]) {
  const perSecond = width / (end - start);
  return { width, lane, start, end, x: (t) => (t - start) * perSecond, t: (x) => start + x / perSecond };
}

export function draw(canvas, geo, { lanes, epochs, failures, outages, now, chosen, ranks }) {
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
export function under(geo, x, y, { lanes, epochs, failures, outages, now }) {
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

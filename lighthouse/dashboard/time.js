// Moments, durations and numbers as people read them.

const two = (n) => String(n).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

export const clock = (t) => {
  const d = new Date(t * 1000);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
};

export const clockMs = (t) => `${clock(t)}.${String(Math.floor((t % 1) * 1000)).padStart(3, "0")}`;

export const day = (t) => {
  const d = new Date(t * 1000);
  return `${d.getDate()} ${MONTHS[d.getMonth()]}`;
};

/** A duration in seconds, with two or three digits that matter. */
export function span(s) {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s < 0) return `−${span(-s)}`;
  if (s < 0.9995) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(2)} s`;
  if (s < 59.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor((whole % 86400) / 3600))} h`;
}

export const count = (n) => (Number.isFinite(n) ? Math.round(n).toLocaleString("en-US") : "–");

/** A number with about `digits` digits, with k, M, G, T. */
export function short(n, digits = 3) {
  if (n === null || n === undefined || !Number.isFinite(n)) return "–";
  const size = Math.abs(n);
  for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${Number((n / (unit === 1e4 ? 1e3 : unit)).toPrecision(digits))} ${name}`;
  }
  return String(Number(n.toPrecision(digits)));
}

export function percent(share, digits = 1) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(digits)} %` : "–";
}

const STEPS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
  604800,
];

/** Seconds between ticks so that each has `room` pixels on `width` for [start, end]. */
export function tickStep(start, end, width, room = 76) {
  const wanted = ((end - start) * room) / Math.max(width, room);
  return STEPS.find((step) => step >= wanted) ?? Math.ceil(wanted / 604800) * 604800;
}

/** Round moments within [start, end], in the viewer's time zone. */
export function ticks(start, end, step) {
  const offset = new Date(start * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let t = Math.ceil((start - offset) / step) * step + offset; t <= end; t += step) found.push(t);
  return found;
}

export function tickLabel(t, step) {
  const d = new Date(t * 1000);
  if (step < 1) return `${clock(t)}.${Math.floor((t % 1) * 10 + 1e-6)}`;
  if (step < 60) return clock(t);
  if (d.getHours() === 0 && d.getMinutes() === 0) return day(t);
  return `${two(d.getHours())}:${two(d.getMinutes())}`;
}

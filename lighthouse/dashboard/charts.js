// Strips of numbers under the lanes, on the same time axis, with one cursor and one zoom.
// `uPlot` is a global name: its published short build is a plain script, which index.html loads first.
import { html, useEffect, useRef } from "./html.js";
import { zoom } from "./model.js";
import { indexAt, until } from "./series.js";
import { nowOf, store, useStore, windowOf } from "./store.js";
import { short, span, tickLabel, ticks, tickStep } from "./time.js";

const gutter = () => Number.parseFloat(css("--gutter")); // pixels left of the time axis, for lanes and charts alike
const HEIGHT = 72;
const AXIS = 22;

/** GB/s in the unit that suits it. */
const rate = (gbps) => (gbps ? `${short(gbps * 1e9).replace(/(\d)$/, "$1 ")}B/s` : gbps === 0 ? "0" : "–");

export const CHARTS = [
  { name: "step_s", label: "Step time", value: span, tick: (v) => `${short(v, 3)} s`, floor: 0, about: "from one commit to the next" },
  { name: "gbps", label: "FTAR", value: rate, tick: rate, floor: 0, about: "bytes that one rank sends in all-reduces, for each second in which they are under way" },
  { name: "loss", label: "Loss", value: (v) => (v ?? NaN).toFixed(4), tick: (v) => short(v, 3), floor: null, beside: "eval_loss", about: "mean loss of a step, and of evaluations as points; the axis does not begin at 0" },
  { name: "healthy", label: "Healthy replicas", value: (v) => `${v}`, tick: (v) => (Number.isInteger(v) ? `${v}` : ""), floor: 0, step: true, about: "replicas that contributed to a step" },
  { name: "units", label: "Units", value: (v) => `${v}`, tick: (v) => (Number.isInteger(v) ? `${v}` : ""), floor: 0, step: true, about: "micro-batches of one rank in a step; the axis ends at a step to which all replicas contribute" },
];

/** A strip for each value that the training loop logs. */
const loggedCharts = (names) =>
  names.filter((name) => name !== "eval_loss").map((name) => ({ name, logged: true, color: "loss", label: name, value: (v) => short(v, 5), tick: (v) => short(v, 3), floor: null, about: "logged by the training loop; the axis does not begin at 0" }));

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function reach(chart, low, high, { job, head }) {
  const whole = { healthy: job.total, units: head.units_wanted ?? 0 }[chart.name];
  if (whole !== undefined) return [0, Math.max(whole, high ?? 0) * 1.08 || 1];
  if (low === null || low === undefined) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.08 || 1;
  return [chart.floor === null ? low - room : Math.min(chart.floor, low), high + room];
}

function options(chart, last, width) {
  const font = `11px ${css("--font")}`;
  const splits = (u, _, min, max) => ticks(min, max, tickStep(min, max, u.bbox.width / (devicePixelRatio || 1)));
  const axis = { stroke: () => css("--ink-3"), font, ticks: { show: false } };
  const grid = { stroke: () => css("--grid"), width: 1 };
  const times = (u, found) => {
    const [room, drawn] = [28, u.bbox.width / (devicePixelRatio || 1)]; // a label that would be cut is left out
    const step = tickStep(u.scales.x.min, u.scales.x.max, drawn);
    return found.map((t) => {
      const x = u.valToPos(t, "x");
      return x < room || x > drawn - room ? "" : tickLabel(t, step);
    });
  };
  return {
    width,
    height: HEIGHT + (last ? AXIS : 0),
    padding: [5, 0, last ? 0 : 5, 0],
    legend: { show: false },
    cursor: { y: false, points: { size: 5 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => null } },
    scales: { x: { time: false, range: () => windowOf(store.get()) }, y: { range: (_, low, high) => reach(chart, low, high, store.get().overview) } },
    axes: [
      { ...axis, grid, splits, size: last ? AXIS : 0, values: last ? times : () => [], gap: 2 },
      { ...axis, grid, size: gutter(), gap: 8, space: 22, values: (_, found) => found.map(chart.tick) },
    ],
    series: [
      {},
      {
        stroke: () => css(`--c-${chart.color ?? chart.name}`),
        fill: () => css(`--f-${chart.color ?? chart.name}`),
        width: 1.25,
        points: { show: false },
        spanGaps: false,
        paths: chart.step ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear(),
      },
      ...(chart.beside ? [{ stroke: () => css("--c-healthy"), width: 1.25, points: { show: true, size: 4 } }] : []),
    ],
  };
}

const NONE = { t: [], step: [], value: [] };

/** Times and values of a curve. */
const curve = ({ overview, at }, name, logged) => {
  const all = logged ? (overview.logged[name] ?? NONE) : overview.series;
  const series = at === null ? all : until(all, at);
  return [series.t, series[logged ? "value" : name]];
};

const curves = (state, { name, logged, beside }) => [curve(state, name, logged), ...(beside ? [curve(state, beside, true)] : [])];

const columns = (state, chart) => (chart.beside ? uPlot.join(curves(state, chart)) : curves(state, chart)[0]);

function Readout({ chart }) {
  const text = useStore((state) => {
    const t = Math.min(state.cursor ?? Infinity, nowOf(state));
    const [own, beside] = curves(state, chart).map(([times, values]) => values[indexAt(times, t)] ?? null);
    return `${own === null ? "–" : chart.value(own)}${(beside ?? null) === null ? "" : ` · eval ${chart.value(beside)}`}`;
  });
  const pointed = useStore((state) => state.cursor !== null);
  return html`<output class=${`readout num ${pointed ? "pointed" : ""}`}>${text}</output>`;
}

function Strip({ chart, last }) {
  const host = useRef(null);
  useEffect(() => {
    let own = false; // the cursor was set from here, not by the pointer
    const set = uPlot.assign(options(chart, last, host.current.clientWidth), {
      hooks: {
        setSelect: [
          (u) => {
            if (u.select.width < 4) return;
            zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          },
        ],
        setCursor: [(u) => !own && store.set({ cursor: u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null })],
      },
    });
    const plot = new uPlot(set, columns(store.get(), chart), host.current);
    const doubled = () => zoom(null);
    plot.over.addEventListener("dblclick", doubled);
    const point = (state) => {
      own = true;
      const left = state.cursor === null ? -10 : plot.valToPos(state.cursor, "x");
      if (Math.abs((plot.cursor.left ?? -10) - left) > 0.5) plot.setCursor({ left, top: left < 0 ? -10 : 1 });
      own = false;
    };
    const fit = new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width > 0) plot.setSize({ width: Math.floor(contentRect.width), height: plot.height });
    });
    fit.observe(host.current);
    const unfollow = store.follow((state, before) => {
      if (!state.overview) return;
      if (state.theme !== before.theme) plot.redraw(false);
      if (state.overview !== before.overview || state.at !== before.at || state.zoom !== before.zoom || state.span !== before.span) {
        plot.setData(columns(state, chart));
      }
      if (state.cursor !== before.cursor) point(state);
    });
    return () => {
      fit.disconnect();
      unfollow();
      plot.destroy();
    };
  }, []);
  return html`
    <figure class="strip" aria-label=${`${chart.label} over time`}>
      <figcaption title=${chart.about}>${chart.label} <${Readout} chart=${chart} /></figcaption>
      <div class="plot" ref=${host} />
    </figure>
  `;
}

export function Charts() {
  const names = useStore(({ overview }) => Object.keys(overview.logged).join(" "));
  const charts = [...CHARTS, ...loggedCharts(names ? names.split(" ") : [])];
  const strips = charts.map((chart, n) => [chart, n === charts.length - 1]); // the last one has the time axis
  return html`<div class="strips">${strips.map(([chart, last]) => html`<${Strip} key=${`${chart.logged ? "logged " : ""}${chart.name} ${last}`} chart=${chart} last=${last} />`)}</div>`;
}

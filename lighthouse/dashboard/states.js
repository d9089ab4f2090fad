// The states of a replica: what they are called, what they mean, and how they are drawn. Colours are in style.css;
// each state also has a pattern, so that no two need a colour to be told apart.
import { html, useEffect, useRef } from "./html.js";
import { useStore } from "./store.js";

export const STATES = {
  training: { about: "contributes to every step", pattern: "plain" },
  standby: { about: "holds the state and trains nothing, until it is needed (quorum.allowed)", pattern: "dash" },
  behind: { about: "holds an older state than the head", pattern: "rising" },
  fetching: { about: "fetches the state from a donor", pattern: "falling" },
  warming: { about: "does the work before it checks in", pattern: "upright" },
  booting: { about: "its processes are up, not warm yet", pattern: "dots" },
  retrying: { about: "repeats a step whose ring broke", pattern: "chevron" },
  stalled: { about: "no beats, or no progress within them", pattern: "cross" },
  drained: { about: "kept away by an operator, or by the size of the job", pattern: "level" },
  dead: { about: "lost, and not started again", pattern: "grid" },
  down: { about: "no process runs", pattern: "line" },
  final: { about: "holds the final state", pattern: "plain" },
};

// From where a replica took its state when it started.
export const RUNGS = {
  agent: "the memory of its own hosts",
  copy: "copies on other hosts",
  replica: "the memory of another replica",
  checkpoint: "the newest checkpoint",
  initial: "nowhere: its initial weights",
};

/** The hosts of a replica as text, with the number of ranks on each; "" if it has not said it. */
export function hostsOf(replica) {
  const hosts = replica?.hosts ?? [];
  const told = hosts.slice(0, 4).map(({ host, ranks }) => `${host} (${ranks} ${ranks === 1 ? "rank" : "ranks"})`);
  return told.join(", ") + (hosts.length > 4 ? `, … (${hosts.length} hosts)` : "");
}

/** The copies of a replica's shards as text, by the ranks whose shards they are; "" if none is to be made. */
export function copiesOf({ copies, copy_hosts: hosts }) {
  const told = copies.slice(0, 4).map(({ host, shards }) => `${/\D/.test(shards) ? "ranks" : "rank"} ${shards} on ${host}`);
  return told.join(", ") + (hosts > told.length ? `, … (${hosts} hosts)` : "");
}

// From what may be painted over to what has to be seen, where many share one pixel.
export const BY_WEIGHT = [
  "training", "standby", "final", "down", "drained", "behind", "booting", "warming", "fetching", "retrying", "stalled", "dead",
];

const TILE = 6;
const STROKES = {
  rising: [[0, 6, 6, 0]],
  falling: [[0, 0, 6, 6]],
  upright: [[3, 0, 3, 6]],
  dash: [[1, 3, 4, 3]],
  level: [[0, 1.5, 6, 1.5], [0, 4.5, 6, 4.5]],
  cross: [[0, 6, 6, 0], [0, 0, 6, 6]],
  grid: [[3, 0, 3, 6], [0, 3, 6, 3]],
  chevron: [[0, 0, 3, 3], [3, 3, 0, 6]],
};

function tile(pattern, ink, ratio) {
  const canvas = new OffscreenCanvas(TILE * ratio, TILE * ratio);
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.strokeStyle = g.fillStyle = ink;
  g.lineWidth = 1;
  if (pattern === "dots") {
    g.fillRect(1, 1, 1.5, 1.5);
    g.fillRect(4, 4, 1.5, 1.5);
  }
  for (const [x0, y0, x1, y1] of STROKES[pattern] ?? []) {
    g.beginPath();
    g.moveTo(x0, y0);
    g.lineTo(x1, y1);
    g.stroke();
  }
  return canvas;
}

let made = { theme: "", ratio: 0, inks: {} };

/** Colour and pattern of every state in the present theme, for a canvas of `ratio` device pixels per pixel. */
export function inks(ratio) {
  const { theme } = document.documentElement.dataset;
  if (made.theme === theme && made.ratio === ratio) return made.inks;
  const style = getComputedStyle(document.documentElement);
  const found = {};
  for (const [state, { pattern }] of Object.entries(STATES)) {
    const fill = style.getPropertyValue(`--s-${state}`).trim();
    const ink = style.getPropertyValue(`--p-${state}`).trim();
    const patterned = STROKES[pattern] || pattern === "dots";
    found[state] = { fill, ink, pattern, tile: patterned ? tile(pattern, ink, ratio) : null };
  }
  made = { theme, ratio, inks: found };
  return found;
}

/** Paint one stretch of a state; `g` is scaled to CSS pixels. */
export function paint(g, look, x, y, width, height, ratio) {
  if (look.pattern === "line") {
    g.fillStyle = look.ink;
    g.fillRect(x, y + height / 2 - 0.5, width, 1);
    return;
  }
  g.fillStyle = look.fill;
  g.fillRect(x, y, width, height);
  if (!look.tile || width < 3) return;
  const pattern = g.createPattern(look.tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  g.fillStyle = pattern;
  g.fillRect(x, y, width, height);
}

/** A small sample of a state, painted as the lanes paint it. */
export function Swatch({ state, width = 18, height = 11 }) {
  const canvas = useRef(null);
  const theme = useStore((s) => s.theme);
  useEffect(() => {
    const ratio = devicePixelRatio || 1;
    canvas.current.width = width * ratio;
    canvas.current.height = height * ratio;
    const g = canvas.current.getContext("2d");
    g.scale(ratio, ratio);
    paint(g, inks(ratio)[state] ?? inks(ratio).down, 0, 0, width, height, ratio);
  }, [state, theme]);
  return html`<canvas ref=${canvas} class="swatch" style=${{ width: `${width}px`, height: `${height}px` }} aria-hidden="true" />`;
}

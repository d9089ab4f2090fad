// A small sample of a state, painted as the lanes paint it.
import { html, useEffect, useRef } from "./html.js";
import { inks, paint } from "./states.js";
import { useStore } from "./store.js";

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

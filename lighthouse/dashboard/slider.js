// Replay: the moment that the page shows, by drag, by keys, or playing.
import { html, useEffect, useRef, useState } from "./html.js";
import { moveTo } from "./model.js";
import { extentOf, store, useStore, windowOf } from "./store.js";
import { clock, day, span } from "./time.js";

const SPEEDS = [1, 10, 60, 600];

export function Slider() {
  const at = useStore((s) => s.at);
  const overview = useStore((s) => s.overview);
  useStore((s) => s.zoom);
  const [first, end] = extentOf(store.get());
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(() => SPEEDS.find((s) => (end - first) / s <= 120) ?? SPEEDS.at(-1));
  const clockwork = useRef(null);

  useEffect(() => {
    if (!playing) return undefined;
    let last = performance.now();
    clockwork.current = setInterval(() => {
      const now = performance.now();
      const next = Math.min(end, store.get().at + ((now - last) / 1000) * speed);
      last = now;
      moveTo(next);
      if (next >= end) setPlaying(false);
    }, 50);
    return () => clearInterval(clockwork.current);
  }, [playing, speed, end]);

  const play = () => {
    if (!playing && at >= end) moveTo(windowOf(store.get())[0]);
    setPlaying(!playing);
  };
  const key = (event) => {
    const page = { PageUp: 0.05, PageDown: -0.05 }[event.key];
    if (event.key === " ") play();
    else if (page) moveTo(Math.max(first, Math.min(end, at + page * (end - first))));
    else return;
    event.preventDefault();
  };
  return overview && html`
    <div class="replay" role="group" aria-label="Replay">
      <button type="button" class="solid play" aria-pressed=${playing} onClick=${play}>${playing ? "pause" : "play"}</button>
      <input
        type="range" aria-label="Moment" min=${first} max=${end} step=${Math.max(0.01, (end - first) / 2000)} value=${at}
        aria-valuetext=${`${day(at)} ${clock(at)}`} onInput=${(e) => moveTo(Math.min(end, Number(e.target.value)))} onKeyDown=${key}
      />
      <output class="num">${day(at)} ${clock(at)} <span class="quiet">${span(at - first)} of ${span(end - first)}</span></output>
      <select aria-label="Speed" value=${String(speed)} onChange=${(e) => setSpeed(Number(e.target.value))}>
        ${SPEEDS.map((s) => html`<option key=${s} value=${String(s)}>${s}×</option>`)}
      </select>
    </div>
  `;
}

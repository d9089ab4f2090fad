// What the page knows, in one object that is replaced as a whole. Followers are called after each change.
import { useEffect, useRef, useState } from "./html.js";

export function createStore(initial) {
  let state = initial;
  const followers = new Set();
  return {
    get: () => state,
    set(patch) {
      const before = state;
      state = { ...state, ...patch };
      for (const follower of followers) follower(state, before);
    },
    follow(follower) {
      followers.add(follower);
      return () => followers.delete(follower);
    },
  };
}

export const store = createStore({
  overview: null, // the newest answer to GET /v1/overview
  received: 0, // performance.now() at which it came, ms
  connection: "connecting", // connecting | live | reconnecting | replay | refused
  trouble: "", // why, in one line
  zoom: null, // [start, end] in Unix s
  span: null, // follow the last so many seconds; null: the whole job
  at: null, // replay: the moment shown, Unix s
  whole: null, // replay: [first, last] moment that is recorded, Unix s
  cursor: null, // the moment under the pointer, Unix s
  replica: null, // the replica in the drawer
  failure: null, // seq of the failure in the waterfall
  event: null, // seq that the address names
  diagnosis: false, // whether the panel is open that says who waits for whom
  asked: null, // the action that waits for its confirmation
  notice: null, // {text, good}: what the last action came to
  theme: document.documentElement.dataset.theme,
});

/** The part of the state that `select` names; the component is drawn again when it changes. */
export function useStore(select) {
  const chosen = useRef(select);
  chosen.current = select;
  const [, redraw] = useState(0);
  const value = select(store.get());
  const seen = useRef(value);
  seen.current = value;
  useEffect(() => {
    const check = (state) => {
      if (chosen.current(state) !== seen.current) redraw((n) => n + 1);
    };
    check(store.get());
    return store.follow(check);
  }, []);
  return value;
}

/** The moment that counts as now, Unix s: the lighthouse's clock, a finished job's end, or the slider's place. */
export function nowOf({ overview, received, at }) {
  if (at !== null) return at;
  if (!overview) return Date.now() / 1000;
  if (!overview.job.live || overview.job.ended) return overview.job.ended ?? overview.now;
  return overview.now + (performance.now() - received) / 1000;
}

/** First and last moment of the job, Unix s. */
export function extentOf(state) {
  const { overview, whole } = state;
  if (whole) return whole;
  const end = nowOf(state);
  const first = overview?.job.started ?? overview?.series.t[0] ?? end - 60;
  return [Math.min(first, end - 1), end];
}

/** What lanes and charts show, Unix s. */
export function windowOf(state) {
  if (state.zoom) return state.zoom;
  const [first, end] = extentOf(state);
  if (state.span === null) return [first, end];
  const last = state.at ?? end;
  return [last - state.span, last];
}

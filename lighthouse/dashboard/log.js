// The journal: filter, endless scroll into the past, a link to every row.
import { get } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { onEvent } from "./model.js";
import { EMPTY, HELD, PAGE, passes, Row, shaped, withNewer, withOlder } from "./log_rows.js";
import { store, useStore } from "./store.js";

const NAMES = 200;
const NO_FILTER = { replica: "", event: "", text: "" };

/** The log's rows and how to move through them. */
function useJournal(filter, ceiling, named) {
  const [held, setHeld] = useState(EMPTY);
  const [busy, setBusy] = useState(true);
  const [error, setError] = useState("");
  const connection = useStore((s) => s.connection);
  const turn = useRef(0);
  const early = useRef([]); // live rows that came while a page was on its way

  const ask = async (query) => {
    const given = Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== ""));
    const bounds = ceiling !== null && query.after === undefined ? { before: ceiling + 1, ...query } : query;
    return (await get("/v1/events", { limit: PAGE, ...given, ...bounds })).events;
  };
  const guarded = async (work) => {
    const mine = ++turn.current;
    setBusy(true);
    setError("");
    try {
      const next = await work();
      if (mine !== turn.current) return;
      const live = early.current.filter((row) => passes(row, filter));
      early.current = [];
      setHeld((now) => {
        const then = next(now);
        return then.newer ? then : withNewer(then, live, false);
      });
    } catch (failure) {
      if (mine === turn.current) setError(failure.message);
    } finally {
      if (mine === turn.current) setBusy(false);
    }
  };

  const read = (query, join) =>
    guarded(async () => {
      const page = await ask(query);
      return (now) => join(now, page, page.length === PAGE);
    });
  const newest = () => read({}, (_, page, full) => withOlder(EMPTY, page, full));
  const around = (seq) =>
    guarded(async () => {
      const [past, future] = await Promise.all([ask({ before: seq + 1 }), ceiling === null ? ask({ after: seq }) : []]);
      return () => withNewer(withOlder(EMPTY, past, past.length === PAGE), future, future.length === PAGE);
    });
  const older = () => read({ before: held.rows[0].seq }, withOlder);
  const newer = () => read({ after: held.rows.at(-1).seq }, withNewer);

  const begin = () => (named === null ? newest() : around(named));
  useEffect(() => void begin(), [filter, ceiling]);
  useEffect(() => {
    if (named !== null && !held.rows.some((row) => row.seq === named) && held !== EMPTY) around(named);
  }, [named]);
  useEffect(() => {
    if (connection === "live" && error) begin();
  }, [connection]);
  useEffect(() => {
    if (ceiling !== null) return undefined;
    return onEvent((row) => {
      if (row === null) return newest();
      early.current.push(shaped(row));
      if (early.current.length > HELD) early.current.shift();
      setHeld((now) => {
        if (now.newer || now === EMPTY) return now;
        const live = shaped(row);
        return passes(live, filter) ? withNewer(now, [live], false) : now;
      });
    });
  }, [filter, ceiling]);
  return { ...held, busy, error, older: held.older ? older : null, newer: held.newer ? newer : null, newest };
}

function Filter({ filter, setFilter, names }) {
  const slots = useStore((s) => s.overview.job.slots);
  const [text, setText] = useState(filter.text);
  useEffect(() => {
    const timer = setTimeout(() => text !== filter.text && setFilter({ ...filter, text }), 200);
    return () => clearTimeout(timer);
  }, [text, filter]);
  const clear = () => {
    setText("");
    setFilter(NO_FILTER);
  };
  const set = Object.values(filter).some(Boolean);
  return html`
    <form class="filter" role="search" aria-label="Filter the log" onSubmit=${(e) => e.preventDefault()}>
      <select aria-label="Replica" value=${filter.replica} onChange=${(e) => setFilter({ ...filter, replica: e.target.value })}>
        <option value="">every replica</option>
        ${Array.from({ length: slots }, (_, r) => html`<option key=${r} value=${String(r)}>replica ${r}</option>`)}
      </select>
      <select aria-label="Event" value=${filter.event} onChange=${(e) => setFilter({ ...filter, event: e.target.value })}>
        <option value="">every event</option>
        ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
      <input type="search" aria-label="Text" placeholder="text in the row" value=${text} maxlength="200" onInput=${(e) => setText(e.target.value)} />
      <button type="button" class="quiet-button" disabled=${!set} onClick=${clear}>clear</button>
    </form>
  `;
}

export function Log() {
  const [filter, setFilter] = useState(NO_FILTER);
  const [names, setNames] = useState([]);
  const named = useStore((s) => s.event);
  const ceiling = useStore((s) => (s.at === null ? null : s.overview.seq));
  const journal = useJournal(filter, ceiling, named);
  const list = useRef(null);
  const ends = [useRef(null), useRef(null)];
  const move = useRef({});
  move.current = journal.busy || journal.error ? {} : { newer: journal.newer, older: journal.older };

  useEffect(() => {
    const fresh = new Set(names);
    for (const { event } of journal.rows) fresh.add(event);
    if (fresh.size > names.length && fresh.size <= NAMES) setNames([...fresh].sort());
  }, [journal.rows]);
  useEffect(() => {
    const watch = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          if (entry.isIntersecting) move.current[entry.target.dataset.end]?.();
        }
      },
      { root: list.current, rootMargin: "200px" },
    );
    ends.forEach((end) => watch.observe(end.current));
    return () => watch.disconnect();
  }, [journal.busy]);
  useEffect(() => {
    if (named !== null && !journal.rows.some((row) => row.seq === named)) setFilter(NO_FILTER);
  }, [named]);
  const ready = journal.rows.some((row) => row.seq === named);
  useEffect(() => {
    if (!ready) return;
    const row = list.current.querySelector(`[data-seq="${named}"]`);
    row.scrollIntoView({ block: "center" });
  }, [named, ready]);
  const leave = () => {
    history.replaceState(null, "", location.pathname + location.search);
    store.set({ event: null });
    journal.newest();
    list.current.scrollTop = 0;
  };

  return html`
    <section class="panel log" aria-labelledby="log">
      <header>
        <h2 id="log">Events</h2>
        <${Filter} filter=${filter} setFilter=${setFilter} names=${names} />
        ${(journal.newer || named !== null) && html`<button type="button" class="quiet-button" onClick=${leave}>newest</button>`}
      </header>
      <div class="rows" ref=${list} tabindex="0" role="log" aria-live="off" aria-label="Events, newest first" aria-busy=${journal.busy}>
        <div ref=${ends[0]} data-end="newer" class="end" />
        <ol>
          ${[...journal.rows].reverse().map((row) => html`<${Row} key=${row.seq} row=${row} named=${row.seq === named} />`)}
        </ol>
        <div ref=${ends[1]} data-end="older" class="end quiet">
          ${journal.error || (journal.busy ? "reading" : journal.older ? "" : journal.rows.length ? "the beginning" : "no event passes the filter")}
        </div>
      </div>
    </section>
  `;
}

// The rows of the log that are held: a stretch of the journal, ascending by number, bounded at both ends.

export const PAGE = 100;
export const HELD = 800;

export const EMPTY = { rows: [], older: false, newer: false };

/** Whether a row passes the filter; the same rule as the lighthouse's for rows that come live. */
export function passes(row, { replica, event, text }) {
  if (replica !== "" && row.replica !== Number(replica)) return false;
  if (event !== "" && row.event !== event) return false;
  return text === "" || JSON.stringify({ ...row, said: undefined }).toLowerCase().includes(text.toLowerCase());
}

/** A live row as `/v1/events` would give it: what is not named is a fact. */
export function shaped(row) {
  if (row.facts) return row;
  const { seq, t, event, source, replica = null, rank = null, incarnation = null, reason = "", said = event, ...facts } = row;
  return { seq, t, event, source, replica, rank, incarnation, reason, said, facts };
}

/** `held` and `more` as one ascending list without doubles. */
function merged(held, more) {
  const all = new Map(held.map((row) => [row.seq, row]));
  for (const row of more) all.set(row.seq, row);
  return [...all.values()].sort((a, b) => a.seq - b.seq);
}

/** With a page of older rows; the newest are let go where there are too many. */
export function withOlder(held, page, full) {
  const rows = merged(held.rows, page);
  return { rows: rows.slice(0, HELD), older: full, newer: held.newer || rows.length > HELD };
}

/** With a page of newer rows, or with live ones; the oldest are let go where there are too many. */
export function withNewer(held, page, full) {
  const rows = merged(held.rows, page);
  return { rows: rows.slice(-HELD), older: held.older || rows.length > HELD, newer: full };
}

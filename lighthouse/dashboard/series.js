// Columns of numbers over time, as the charts take them.

/** `series` with one commit more. */
export function extended(series, row) {
  const last = series.t.at(-1);
  if (last !== undefined && row.t <= last) return series;
  const gbps = row.ftar_s > 0 ? row.ftar_bytes / row.ftar_s / 1e9 : null;
  const { t, step, loss, step_s, lr_scale, units } = row;
  const more = { t, step, loss, step_s, lr_scale, units, gbps, healthy: row.contributors.length };
  return Object.fromEntries(
    Object.entries(series).map(([name, column]) => [name, [...column, more[name] ?? column.at(-1) ?? null]]),
  );
}

/** Index of the last value at or before `t`; -1 before the first. `times` ascends. */
export function indexAt(times, t) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= t) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** `series` up to `t`: a replay shows nothing from later. */
export function until(series, t) {
  const end = indexAt(series.t, t) + 1;
  if (end === series.t.length) return series;
  return Object.fromEntries(Object.entries(series).map(([name, column]) => [name, column.slice(0, end)]));
}

// What was seen in the last minutes: [time, depth, in, out, dead letters] by queue.

const KEPT = 300; // seconds

/** Put the figures of another moment behind those that are known. */
export function remember(history, overview) {
  for (const name of [...history.keys()]) {
    if (!overview.queues.some((queue) => queue.name === name)) history.delete(name);
  }
  for (const queue of overview.queues) {
    const points = history.get(queue.name) ?? [];
    if (points.length && points.at(-1)[0] >= overview.at - 0.05) continue; // came with the history
    points.push([overview.at, queue.depth, queue.in_rate, queue.out_rate, queue.dead_letters]);
    while (points.length && points[0][0] < overview.at - KEPT) points.shift();
    history.set(queue.name, points);
  }
}

/** All queues together, moment by moment. */
export function totals(history) {
  const sums = new Map();
  for (const points of history.values()) {
    for (const [at, ...values] of points) {
      const moment = Math.round(at * 4) / 4; // one look takes a while
      const row = sums.get(moment) ?? [moment, null, null, null, null];
      values.forEach((value, index) => { if (value !== null) row[index + 1] = (row[index + 1] ?? 0) + value; });
      sums.set(moment, row);
    }
  }
  return [...sums.values()].sort((one, other) => one[0] - other[0]);
}

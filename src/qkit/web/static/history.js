// History of the last five minutes, by queue: [time, depth, published/s, acked/s, dead letters].

const HISTORY_SECONDS = 300;

/** Append the statistics of an overview to the history. */
export function addPoints(history, overview) {
  for (const name of [...history.keys()]) {
    if (!overview.queues.some((queue) => queue.name === name)) history.delete(name);
  }
  for (const queue of overview.queues) {
    const points = history.get(queue.name) ?? [];
    if (points.length && points.at(-1)[0] >= overview.sampled_at - 0.05) continue; // already in the history event
    points.push([overview.sampled_at, queue.depth, queue.published_per_second, queue.acked_per_second, queue.dead_letters]);
    while (points.length && points[0][0] < overview.sampled_at - HISTORY_SECONDS) points.shift();
    history.set(queue.name, points);
  }
}

/** Return the history of the sums over all queues. */
export function totals(history) {
  const sums = new Map();
  for (const points of history.values()) {
    for (const [at, ...values] of points) {
      const time = Math.round(at * 4) / 4; // times of one sample may differ slightly
      const row = sums.get(time) ?? [time, null, null, null, null];
      values.forEach((value, index) => { if (value !== null) row[index + 1] = (row[index + 1] ?? 0) + value; });
      sums.set(time, row);
    }
  }
  return [...sums.values()].sort((one, other) => one[0] - other[0]);
}

// The overview page: totals, all queues, and the health of the service.

import { peak, sparkline } from "./charts.js";
import { SEVERITY, ago, count, duration, h, pill, plural, rate, setNote, setText } from "./elements.js";
import { totals } from "./history.js";

const TILES = [
  { name: "Depth", kind: "accent", figure: (all) => count(all.depth), series: 1 },
  { name: "Published/s", kind: "published", figure: (all) => rate(all.published_per_second), series: 2 },
  { name: "Acked/s", kind: "acked", figure: (all) => rate(all.acked_per_second), series: 3 },
  { name: "Dead letters", kind: "bad", figure: (all) => count(all.dead_letters), series: 4 },
];

/** Suffix of rates that cover this service only, because the broker does not count messages. */
export const SERVICE_ONLY = "this service only";

const COLUMNS = ["Queue", "Depth", "Messages/s", "Oldest", "In flight", "Retried", "Dead letters"];

export function overviewPage() {
  const tiles = TILES.map((tile) => {
    const spark = sparkline({ width: 200, height: 44, seconds: 300, kind: tile.kind, label: tile.name, ends: false });
    const value = h("strong", {}, "–");
    const heading = h("h2", {}, tile.name);
    return { ...tile, spark, value, heading, element: h("div", { class: "tile panel" }, heading, value, spark.element) };
  });
  const health = h("div", { class: "health" });
  const body = h("tbody");
  const table = h(
    "table", { class: "queues" },
    h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col" }, name)))),
    body,
  );
  const omitted = h("p", { class: "hint", hidden: true });
  const empty = h(
    "div", { class: "empty panel", hidden: true },
    h("h2", {}, "No queues yet"),
    h("p", {}, "A queue appears here with its first message or its first consumer."),
    h("pre", {}, 'await service.send("orders", {"id": 1})'),
  );
  const listing = h("section", { class: "panel listing", "aria-label": "Queues" }, table);
  const element = h(
    "div", { class: "page" },
    h("h1", { class: "visually-hidden" }, "All queues"),
    h("section", { class: "tiles", "aria-label": "Totals" }, tiles.map((tile) => tile.element)),
    listing, empty, omitted,
    h("section", { class: "panel", "aria-label": "Health" }, h("h2", {}, "Health"), health),
  );
  const rows = new Map();

  return {
    element,
    title: "qkit",
    update(overview, history) {
      const points = totals(history);
      const serviceOnly = overview.queues.some((queue) => queue.counted_by_service);
      for (const tile of tiles) {
        setText(tile.value, tile.figure(overview.totals));
        setText(tile.heading, serviceOnly && (tile.series === 2 || tile.series === 3) ? `${tile.name}, ${SERVICE_ONLY}` : tile.name);
        tile.spark.draw(points.map((row) => [row[0], row[tile.series]]), overview.sampled_at, `${tile.name}: ${tile.figure(overview.totals)}`);
      }
      for (const [name, row] of rows) {
        if (!overview.queues.some((queue) => queue.name === name)) { row.element.remove(); rows.delete(name); }
      }
      for (const queue of overview.queues) {
        if (!rows.has(queue.name)) {
          rows.set(queue.name, queueRow(queue.name));
          const next = [...rows.keys()].sort().find((name) => name > queue.name && rows.get(name).element.isConnected);
          body.insertBefore(rows.get(queue.name).element, next ? rows.get(next).element : null);
        }
        rows.get(queue.name).update(queue, history.get(queue.name) ?? [], overview.sampled_at);
      }
      listing.hidden = overview.queues.length === 0;
      empty.hidden = overview.queues.length > 0 || overview.error !== null;
      setNote(omitted, overview.queues_omitted ? `${plural(overview.queues_omitted, "more queue")} not shown.` : "");
      health.replaceChildren(...healthFacts(overview));
    },
  };
}

function queueRow(name) {
  const depth = sparkline({ kind: "accent", label: "Depth" });
  const published = sparkline({ kind: "published", label: "Published/s" });
  const acked = sparkline({ kind: "acked", label: "Acked/s" });
  const cells = Object.fromEntries(["depth", "published", "acked", "oldest", "inFlight", "retried"].map((key) => [key, h("span", { class: "number" })]));
  const state = h("span", { class: "state" });
  const letters = h("a", { class: "number", href: `#/queues/${encodeURIComponent(name)}/dead-letters` });
  const scheduled = h("small"), serviceOnly = h("small", { hidden: true });
  const cell = (label, ...children) => h("td", { "data-label": label }, ...children);
  const element = h(
    "tr", {},
    h("th", { scope: "row" }, h("a", { class: "name", href: `#/queues/${encodeURIComponent(name)}` }, name), state),
    cell("Depth", h("div", { class: "beside" }, h("div", {}, cells.depth, scheduled), depth.element)),
    cell("Messages/s", h("div", { class: "beside" }, h("div", {}, cells.published, cells.acked, serviceOnly), h("span", { class: "pair" }, published.element, acked.element))),
    cell("Oldest", cells.oldest),
    cell("In flight", cells.inFlight),
    cell("Retried", cells.retried),
    cell("Dead letters", letters),
  );
  let shown = "";
  return {
    element,
    update(queue, points, now) {
      const severity = queue.error ? "bad" : SEVERITY[queue.state];
      const label = queue.error ? "no statistics" : queue.state === "none" ? (queue.broadcast ? "topic" : "not consumed here") : queue.state;
      if (shown !== label + severity) { state.replaceChildren(pill(label, severity)); shown = label + severity; }
      state.title = queue.error ?? "";
      setText(cells.depth, count(queue.depth));
      setText(scheduled, queue.scheduled ? `${count(queue.scheduled)} scheduled` : "");
      setText(cells.published, `${rate(queue.published_per_second)} published`);
      setText(cells.acked, `${rate(queue.acked_per_second)} acked`);
      setNote(serviceOnly, queue.counted_by_service ? SERVICE_ONLY : "");
      setText(cells.oldest, duration(queue.oldest_message_age_secs));
      setText(cells.inFlight, count(queue.in_flight));
      setText(cells.retried, count(queue.messages_retried));
      setText(letters, count(queue.dead_letters));
      letters.classList.toggle("bad", queue.dead_letters > 0);
      letters.setAttribute("aria-label", `${count(queue.dead_letters)} dead letters of ${name}`);
      depth.draw(points.map((row) => [row[0], row[1]]), now, `Depth: ${count(queue.depth)}`);
      const top = peak(points, now, [2, 3]);
      published.draw(points.map((row) => [row[0], row[2]]), now, `Published/s: ${rate(queue.published_per_second)}`, top);
      acked.draw(points.map((row) => [row[0], row[3]]), now, `Acked/s: ${rate(queue.acked_per_second)}`, top);
    },
  };
}

function healthFacts({ health, backend, sampled_at: at }) {
  const fact = (name, ...value) => h("div", { class: "fact" }, h("h3", {}, name), h("div", {}, ...value));
  const connected = health.connection_state === "connected";
  const sends = health.breaker !== "closed" ? "sends fail immediately until a trial call succeeds" : connected ? "sends are accepted" : "not connected: sends fail";
  const storage = health.durable ? ["durable", ""] : health.durable === null ? ["unknown", ": it does not report whether messages survive a restart"] : ["in memory", ": messages are lost on restart"];
  const lastError = health.connection_state !== "connected" && health.last_error;
  return [
    fact("Connection", pill(health.connection_state, SEVERITY[health.connection_state]), h("small", {}, lastError ? health.last_error : `last success ${ago(health.last_success_at, at)}`)),
    fact("Circuit breaker", pill(health.breaker.replace("_", " "), SEVERITY[health.breaker]), h("small", {}, sends)),
    fact("Storage", pill(storage[0], health.durable ? "good" : "neutral"), h("small", {}, backend + storage[1])),
    h("div", { class: "fact wide" }, h("h3", {}, "Consumers"), consumers(health.consumers, at)),
  ];
}

export function consumers(list, at) {
  if (!list.length) return h("p", { class: "hint" }, "This service has no consumers.");
  return h(
    "ul", { class: "consumers" },
    list.map((item) => h(
      "li", {},
      pill(item.state, SEVERITY[item.state]),
      h("b", {}, item.channel), h("span", { class: "hint" }, item.group),
      h("small", {}, `${count(item.in_flight)} in flight · polled ${ago(item.last_poll_at, at)} · settled ${ago(item.last_settle_at, at)}`),
    )),
  );
}

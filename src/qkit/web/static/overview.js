// The first page: the totals, how the service is, and every queue.

import { peak, sparkline } from "./charts.js";
import { MOODS, ago, count, duration, h, note, pill, plural, rate, say } from "./elements.js";
import { totals } from "./history.js";

const TILES = [
  { name: "Waiting", kind: "accent", figure: (all) => count(all.depth), series: 1 },
  { name: "In per second", kind: "in", figure: (all) => rate(all.in_rate), series: 2 },
  { name: "Done per second", kind: "out", figure: (all) => rate(all.out_rate), series: 3 },
  { name: "Dead letters", kind: "bad", figure: (all) => count(all.dead_letters), series: 4 },
];

/** Beside rates that the broker does not count. */
export const OWN = "by this process";

const COLUMNS = ["Queue", "Waiting", "Traffic per second", "Oldest", "In flight", "Retries", "Dead letters"];

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
  const more = h("p", { class: "hint", hidden: true });
  const empty = h(
    "div", { class: "empty panel", hidden: true },
    h("h2", {}, "No queues yet"),
    h("p", {}, "A queue appears here with its first message, or when a handler consumes it."),
    h("pre", {}, 'await service.send("orders", {"id": 1})'),
  );
  const listing = h("section", { class: "panel listing", "aria-label": "Queues" }, table);
  const element = h(
    "div", { class: "page" },
    h("h1", { class: "unseen" }, "All queues"),
    h("section", { class: "tiles", "aria-label": "Totals" }, tiles.map((tile) => tile.element)),
    listing, empty, more,
    h("section", { class: "panel", "aria-label": "Health" }, h("h2", {}, "Health"), health),
  );
  const rows = new Map();

  return {
    element,
    title: "qkit",
    update(overview, history) {
      const points = totals(history);
      const own = overview.queues.some((queue) => queue.own_rates);
      for (const tile of tiles) {
        say(tile.value, tile.figure(overview.totals));
        say(tile.heading, own && (tile.series === 2 || tile.series === 3) ? `${tile.name}, ${OWN}` : tile.name);
        tile.spark.draw(points.map((row) => [row[0], row[tile.series]]), overview.at, `${tile.name}: ${tile.figure(overview.totals)}`);
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
        rows.get(queue.name).update(queue, history.get(queue.name) ?? [], overview.at);
      }
      listing.hidden = overview.queues.length === 0;
      empty.hidden = overview.queues.length > 0 || overview.problem !== null;
      note(more, overview.hidden ? `${plural(overview.hidden, "more queue")} not shown.` : "");
      health.replaceChildren(...healthFacts(overview));
    },
  };
}

function queueRow(name) {
  const depth = sparkline({ kind: "accent", label: "waiting" });
  const flow = sparkline({ kind: "in", label: "in" });
  const done = sparkline({ kind: "out", label: "done" });
  const cells = Object.fromEntries(["depth", "in", "out", "oldest", "flight", "retried"].map((key) => [key, h("span", { class: "number" })]));
  const state = h("span", { class: "state" });
  const letters = h("a", { class: "number", href: `#/queues/${encodeURIComponent(name)}/dead-letters` });
  const extra = h("small"), whose = h("small", { hidden: true });
  const cell = (label, ...children) => h("td", { "data-label": label }, ...children);
  const element = h(
    "tr", {},
    h("th", { scope: "row" }, h("a", { class: "name", href: `#/queues/${encodeURIComponent(name)}` }, name), state),
    cell("Waiting", h("div", { class: "beside" }, h("div", {}, cells.depth, extra), depth.element)),
    cell("Traffic", h("div", { class: "beside" }, h("div", {}, cells.in, cells.out, whose), h("span", { class: "pair" }, flow.element, done.element))),
    cell("Oldest", cells.oldest),
    cell("In flight", cells.flight),
    cell("Retries", cells.retried),
    cell("Dead letters", letters),
  );
  let shown = "";
  return {
    element,
    update(queue, points, now) {
      const mood = queue.problem ? "bad" : MOODS[queue.state];
      const word = queue.problem ? "no figures" : queue.state === "none" ? (queue.broadcast ? "topic" : "not consumed here") : queue.state;
      if (shown !== word + mood) { state.replaceChildren(pill(word, mood)); shown = word + mood; }
      state.title = queue.problem ?? "";
      say(cells.depth, count(queue.depth));
      say(extra, queue.scheduled ? `${count(queue.scheduled)} scheduled` : "");
      say(cells.in, `${rate(queue.in_rate)} in`);
      say(cells.out, `${rate(queue.out_rate)} done`);
      note(whose, queue.own_rates ? OWN : "");
      say(cells.oldest, duration(queue.oldest_seconds));
      say(cells.flight, count(queue.in_flight));
      say(cells.retried, count(queue.retried));
      say(letters, count(queue.dead_letters));
      letters.classList.toggle("bad", queue.dead_letters > 0);
      letters.setAttribute("aria-label", `${count(queue.dead_letters)} dead letters of ${name}`);
      depth.draw(points.map((row) => [row[0], row[1]]), now, `Waiting: ${count(queue.depth)}`);
      const top = peak(points, now, [2, 3]);
      flow.draw(points.map((row) => [row[0], row[2]]), now, `In per second: ${rate(queue.in_rate)}`, top);
      done.draw(points.map((row) => [row[0], row[3]]), now, `Done per second: ${rate(queue.out_rate)}`, top);
    },
  };
}

function healthFacts({ health, backend, at }) {
  const fact = (name, ...value) => h("div", { class: "fact" }, h("h3", {}, name), h("div", {}, ...value));
  const connected = health.connection_state === "connected";
  const sends = health.breaker !== "closed" ? "sends are refused for now" : connected ? "sends go through" : "there is no connection to send over";
  const broken = health.connection_state !== "connected" && health.last_error;
  return [
    fact("Connection", pill(health.connection_state, MOODS[health.connection_state]), h("small", {}, broken ? health.last_error : `last message ${ago(health.last_success_at, at)}`)),
    fact("Circuit breaker", pill(health.breaker.replace("_", " "), MOODS[health.breaker]), h("small", {}, sends)),
    fact("Storage", pill(health.durable ? "durable" : "in memory", health.durable ? "good" : "calm"), h("small", {}, `${backend}${health.durable ? "" : ": gone after a restart"}`)),
    h("div", { class: "fact wide" }, h("h3", {}, "Consumers"), consumers(health.consumers, at)),
  ];
}

export function consumers(list, at) {
  if (!list.length) return h("p", { class: "hint" }, "This service consumes nothing: it only sends and looks.");
  return h(
    "ul", { class: "consumers" },
    list.map((item) => h(
      "li", {},
      pill(item.state, MOODS[item.state]),
      h("b", {}, item.channel), h("span", { class: "hint" }, item.group),
      h("small", {}, `${count(item.in_flight)} in flight · polled ${ago(item.last_poll_at, at)} · settled ${ago(item.last_settle_at, at)}`),
    )),
  );
}

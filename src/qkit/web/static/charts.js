// Small charts in SVG: a sparkline for a table, a larger one to look into.

import { h, rate, s, say } from "./elements.js";

const SPANS = [60, 120, 300]; // seconds that a large chart may show

/** A line of the last `seconds` of [time, value] points; the newest is at the right edge. */
export function sparkline({ width = 120, height = 32, seconds = 120, kind = "accent", label = "", ends = true } = {}) {
  const area = s("path", { class: "area" });
  const line = s("path", { class: "line" });
  const dot = s("circle", { class: "last", r: 2, hidden: true });
  const element = s(
    "svg",
    { class: `spark ${kind}`, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    area, line, ends ? dot : null,
  );
  return {
    element,
    /** `least` is a height that the scale has at least, for two lines that are compared. */
    draw(points, now, summary, least = 0) {
      const frame = { left: 0, right: ends ? width - 3 : width, top: 3, bottom: ends ? height - 2 : height };
      const shown = points.filter(([at, value]) => at >= now - seconds && value !== null);
      const highest = Math.max(least, ...shown.map(([, value]) => value));
      const places = place(shown, frame, now, span(shown, now, 30, seconds), highest || 1);
      line.setAttribute("d", path(places));
      area.setAttribute("d", closed(places, frame.bottom));
      dot.toggleAttribute("hidden", places.length === 0);
      if (places.length) {
        dot.setAttribute("cx", places.at(-1)[0]);
        dot.setAttribute("cy", places.at(-1)[1]);
      }
      if (summary) element.setAttribute("aria-label", summary);
    },
  };
}

/** The highest of several values that points have, for lines that share a scale. */
export function peak(points, now, columns, seconds = 120) {
  return Math.max(0, ...points.filter(([at]) => at >= now - seconds).flatMap((row) => columns.map((column) => row[column] ?? 0)));
}

/** A chart with a scale, several lines and the values under the pointer. */
export function chart({ series, format = rate, title }) {
  const height = 170;
  const frame = { left: 48, right: 630, top: 12, bottom: height - 24 };
  const grid = s("g", { class: "grid" });
  const lines = series.map(({ kind, filled }) => ({
    area: filled ? s("path", { class: `area ${kind}` }) : null,
    line: s("path", { class: `line ${kind}` }),
  }));
  const cursor = s("line", { class: "cursor", y1: frame.top, y2: frame.bottom, hidden: true });
  const drawing = s(
    "svg", { class: "chart", height, role: "img", "aria-label": title },
    grid, lines.map(({ area }) => area), lines.map(({ line }) => line), cursor,
  );
  const readings = series.map(({ name, kind }) => {
    const value = h("b", {}, "–");
    return { value, element: h("span", { class: `key ${kind}` }, h("i", { "aria-hidden": "true" }), name, " ", value) };
  });
  const heading = h("h3", {}, title);
  const when = h("span", { class: "when" }, "now");
  const element = h(
    "figure", { class: "panel figure" },
    h("figcaption", {}, heading, h("div", { class: "keys" }, readings.map((item) => item.element), when)),
    drawing,
  );
  let rows = [], now = 0, seconds = SPANS[0], pointed = null;

  function paint() {
    const values = rows.flatMap((row) => row.slice(1)).filter((value) => value !== null);
    const top = ceiling(Math.max(0, ...values));
    grid.replaceChildren(...scale(frame, top, seconds, format));
    lines.forEach(({ area, line }, index) => {
      const own = rows.map((row) => [row[0], row[index + 1]]).filter(([, value]) => value !== null);
      const places = place(own, frame, now, seconds, top);
      line.setAttribute("d", path(places));
      if (area) area.setAttribute("d", closed(places, frame.bottom));
    });
    read();
  }

  function read() {
    const row = pointed === null ? rows.at(-1) : nearest(rows, pointed);
    readings.forEach(({ value }, index) => { value.textContent = row ? format(row[index + 1]) : "–"; });
    when.textContent = pointed === null || !row ? "now" : `${Math.round(now - row[0])} s ago`;
    cursor.toggleAttribute("hidden", pointed === null || !row);
    if (row) {
      const x = across(row[0], frame, now, seconds);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
  }

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = event.clientX - box.left;
    pointed = now - seconds * (1 - (x - frame.left) / (frame.right - frame.left));
    read();
  });
  // One unit is one pixel at every width, so that the words keep their size on a phone.
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === 0 || frame.right === contentRect.width - 10) return;
    frame.right = contentRect.width - 10;
    if (now) paint();
  }).observe(drawing);

  drawing.addEventListener("pointerleave", () => { pointed = null; read(); });

  return {
    element,
    name(text) { say(heading, text); drawing.setAttribute("aria-label", text); },
    /** `points` are [time, value of the first series, of the second, …]. */
    draw(points, at) {
      now = at;
      seconds = SPANS.find((some) => some >= span(points, now, 0, SPANS.at(-1)) - 1);
      rows = points.filter(([time]) => time >= now - seconds);
      paint();
    },
  };
}

function scale(frame, top, seconds, format) {
  const marks = [];
  for (const part of [0, 0.5, 1]) {
    const y = frame.bottom - part * (frame.bottom - frame.top);
    marks.push(
      s("line", { x1: frame.left, x2: frame.right, y1: y, y2: y, class: part ? "" : "base" }),
      s("text", { x: frame.left - 8, y: y + 3.5, "text-anchor": "end" }, format(part * top)),
    );
  }
  const narrow = frame.right - frame.left < 300; // room for fewer words
  const step = (seconds > 120 ? 60 : seconds / 4) * (narrow ? 2 : 1);
  for (let back = 0; back <= seconds; back += step) {
    const x = frame.right - (back / seconds) * (frame.right - frame.left);
    const word = back === 0 ? "now" : back % 60 ? `−${back} s` : `−${back / 60} min`;
    const anchor = back === 0 ? "end" : back === seconds ? "start" : "middle";
    marks.push(s("text", { x, y: frame.bottom + 16, "text-anchor": anchor }, word));
  }
  return marks;
}

/** How many seconds are worth showing: as many as were seen, within limits. */
function span(points, now, least, most) {
  return Math.min(most, Math.max(least, points.length ? now - points[0][0] : 0));
}

function across(at, frame, now, seconds) {
  return frame.right - ((now - at) / seconds) * (frame.right - frame.left);
}

function place(points, frame, now, seconds, top) {
  return points.map(([at, value]) => [
    Math.max(frame.left, across(at, frame, now, seconds)),
    frame.bottom - (value / top) * (frame.bottom - frame.top),
    at,
  ]);
}

const GAP = 20; // seconds without a look: the line is interrupted

function path(places) {
  let text = "", before = null;
  for (const [x, y, at] of places) {
    text += `${before === null || at - before > GAP ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = at;
  }
  return text;
}

function closed(places, bottom) {
  let text = "", run = [];
  const end = () => {
    if (run.length > 1) {
      text += `M${run[0][0].toFixed(1)} ${bottom}${run.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("")}L${run.at(-1)[0].toFixed(1)} ${bottom}Z`;
    }
    run = [];
  };
  for (const item of places) {
    if (run.length && item[2] - run.at(-1)[2] > GAP) end();
    run.push(item);
  }
  end();
  return text;
}

/** The next round number: 1, 2, 5, 10, 20, 50, … */
function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function nearest(rows, at) {
  return rows.reduce((best, row) => (!best || Math.abs(row[0] - at) < Math.abs(best[0] - at) ? row : best), null);
}


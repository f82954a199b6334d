// SVG charts: sparklines for tables, and larger charts with axes.

import { h, rate, s, setText } from "./elements.js";

const SPANS = [60, 120, 300]; // time ranges of a large chart, in seconds

/** Create a sparkline of the last `seconds` of [time, value] points; the newest is at the right edge. */
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
    /** `minimum` is the smallest maximum of the scale, for two lines that share one scale. */
    draw(points, now, summary, minimum = 0) {
      const frame = { left: 0, right: ends ? width - 3 : width, top: 3, bottom: ends ? height - 2 : height };
      const shown = points.filter(([at, value]) => at >= now - seconds && value !== null);
      const highest = Math.max(minimum, ...shown.map(([, value]) => value));
      const pixels = toPixels(shown, frame, now, span(shown, now, 30, seconds), highest || 1);
      line.setAttribute("d", path(pixels));
      area.setAttribute("d", closedPath(pixels, frame.bottom));
      dot.toggleAttribute("hidden", pixels.length === 0);
      if (pixels.length) {
        dot.setAttribute("cx", pixels.at(-1)[0]);
        dot.setAttribute("cy", pixels.at(-1)[1]);
      }
      if (summary) element.setAttribute("aria-label", summary);
    },
  };
}

/** Return the highest recent value of the given columns, for lines that share a scale. */
export function peak(points, now, columns, seconds = 120) {
  return Math.max(0, ...points.filter(([at]) => at >= now - seconds).flatMap((row) => columns.map((column) => row[column] ?? 0)));
}

/** Create a chart with axes, a line for each series, and a legend with the values at the pointer. */
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
  const legend = series.map(({ name, kind }) => {
    const value = h("b", {}, "–");
    return { value, element: h("span", { class: `key ${kind}` }, h("i", { "aria-hidden": "true" }), name, " ", value) };
  });
  const heading = h("h3", {}, title);
  const when = h("span", { class: "when" }, "now");
  const element = h(
    "figure", { class: "panel figure" },
    h("figcaption", {}, heading, h("div", { class: "keys" }, legend.map((item) => item.element), when)),
    drawing,
  );
  let rows = [], now = 0, seconds = SPANS[0], pointerTime = null;

  function redraw() {
    const values = rows.flatMap((row) => row.slice(1)).filter((value) => value !== null);
    const top = ceiling(Math.max(0, ...values));
    grid.replaceChildren(...scale(frame, top, seconds, format));
    lines.forEach(({ area, line }, index) => {
      const own = rows.map((row) => [row[0], row[index + 1]]).filter(([, value]) => value !== null);
      const pixels = toPixels(own, frame, now, seconds, top);
      line.setAttribute("d", path(pixels));
      if (area) area.setAttribute("d", closedPath(pixels, frame.bottom));
    });
    showReadings();
  }

  function showReadings() {
    const row = pointerTime === null ? rows.at(-1) : nearest(rows, pointerTime);
    legend.forEach(({ value }, index) => { value.textContent = row ? format(row[index + 1]) : "–"; });
    when.textContent = pointerTime === null || !row ? "now" : `${Math.round(now - row[0])} s ago`;
    cursor.toggleAttribute("hidden", pointerTime === null || !row);
    if (row) {
      const x = toX(row[0], frame, now, seconds);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
    }
  }

  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = event.clientX - box.left;
    pointerTime = now - seconds * (1 - (x - frame.left) / (frame.right - frame.left));
    showReadings();
  });
  // One SVG unit is one pixel at every width, so that labels keep their size on a phone.
  new ResizeObserver(([{ contentRect }]) => {
    if (contentRect.width === 0 || frame.right === contentRect.width - 10) return;
    frame.right = contentRect.width - 10;
    if (now) redraw();
  }).observe(drawing);

  drawing.addEventListener("pointerleave", () => { pointerTime = null; showReadings(); });

  return {
    element,
    setTitle(text) { setText(heading, text); drawing.setAttribute("aria-label", text); },
    /** Draw points [time, value of the first series, of the second, …]. */
    draw(points, at) {
      now = at;
      seconds = SPANS.find((choice) => choice >= span(points, now, 0, SPANS.at(-1)) - 1);
      rows = points.filter(([time]) => time >= now - seconds);
      redraw();
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
  const narrow = frame.right - frame.left < 300; // fewer labels fit
  const step = (seconds > 120 ? 60 : seconds / 4) * (narrow ? 2 : 1);
  for (let back = 0; back <= seconds; back += step) {
    const x = frame.right - (back / seconds) * (frame.right - frame.left);
    const label = back === 0 ? "now" : back % 60 ? `−${back} s` : `−${back / 60} min`;
    const anchor = back === 0 ? "end" : back === seconds ? "start" : "middle";
    marks.push(s("text", { x, y: frame.bottom + 16, "text-anchor": anchor }, label));
  }
  return marks;
}

/** Return the time range of the points in seconds, within limits. */
function span(points, now, minimum, maximum) {
  return Math.min(maximum, Math.max(minimum, points.length ? now - points[0][0] : 0));
}

function toX(at, frame, now, seconds) {
  return frame.right - ((now - at) / seconds) * (frame.right - frame.left);
}

function toPixels(points, frame, now, seconds, top) {
  return points.map(([at, value]) => [
    Math.max(frame.left, toX(at, frame, now, seconds)),
    frame.bottom - (value / top) * (frame.bottom - frame.top),
    at,
  ]);
}

const GAP = 20; // seconds without a point after which the line is interrupted

function path(pixels) {
  let text = "", before = null;
  for (const [x, y, at] of pixels) {
    text += `${before === null || at - before > GAP ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = at;
  }
  return text;
}

function closedPath(pixels, bottom) {
  let text = "", run = [];
  const end = () => {
    if (run.length > 1) {
      text += `M${run[0][0].toFixed(1)} ${bottom}${run.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("")}L${run.at(-1)[0].toFixed(1)} ${bottom}Z`;
    }
    run = [];
  };
  for (const item of pixels) {
    if (run.length && item[2] - run.at(-1)[2] > GAP) end();
    run.push(item);
  }
  end();
  return text;
}

/** Return the smallest of 1, 2, 5, 10, 20, 50, … that is not less than the value. */
function ceiling(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function nearest(rows, at) {
  return rows.reduce((best, row) => (!best || Math.abs(row[0] - at) < Math.abs(best[0] - at) ? row : best), null);
}


// DOM helpers and formatting functions. Content is always added as text nodes, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element with attributes, listeners (`onclick`) and children; strings become text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element; see `h`. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value === "boolean") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Set the text of an element only if it differs, to keep the user's selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set the text of an element, and hide the element if the text is empty. */
export function setNote(element, text) {
  setText(element, text);
  element.hidden = text === "";
}

const ICONS = {
  pause: "M6 4h2.5v12H6zM11.5 4H14v12h-2.5z",
  play: "M6 3.8v12.4L16 10z",
  replay: "M10 4.2a5.8 5.8 0 1 1-5.5 4l1.6.5A4.1 4.1 0 1 0 10 5.900V8.600L5.800 5.100 10 1.700z",
  trash: "M7.500 3h5l.6 1.500H16V6H4V4.500h2.900zM5.200 7h9.600l-.7 10H5.900zM8 9v6h1.200V9zm2.800 0v6H12V9z",
  lock: "M6.500 8.500V6.300a3.500 3.500 0 0 1 7 0v2.200H15V17H5V8.500zm1.600 0h3.800V6.300a1.900 1.900 0 0 0-3.800 0z",
  unlock: "M6.500 8.500V6.300a3.500 3.500 0 0 1 6.900-.8l-1.600.400a1.900 1.900 0 0 0-3.700.400v2.200H15V17H5V8.500z",
  sun: "M10 6.200a3.800 3.800 0 1 1 0 7.600 3.800 3.800 0 0 1 0-7.600zM9.200 1.500h1.600v2.700H9.200zM9.200 15.800h1.600v2.700H9.200zM1.500 9.200h2.700v1.600H1.500zM15.800 9.200h2.700v1.600h-2.700zM3.400 4.500l1.100-1.100 1.900 1.900-1.100 1.100zM13.600 14.700l1.100-1.100 1.900 1.900-1.100 1.100zM3.400 15.500l1.900-1.900 1.100 1.100-1.900 1.900zM13.600 5.300l1.900-1.900 1.100 1.100-1.900 1.900z",
  moon: "M8.300 2.600a7 7 0 0 0 8.900 9.300A7.600 7.600 0 1 1 8.300 2.600z",
  auto: "M10 2.500a7.500 7.500 0 1 1 0 15zM10 2.500a7.500 7.500 0 0 0 0 15v-1.600a5.900 5.900 0 0 1 0-11.800z",
  arrow: "M7.500 4.500 13 10l-5.500 5.500-1.200-1.200L10.600 10 6.300 5.700z",
  send: "M2.500 3.500 18 10 2.500 16.500 4.300 11 11 10 4.300 9z",
  refresh: "M15.500 4v4.800h-4.800l1.900-1.900A4.200 4.200 0 1 0 14 11.500h1.700a5.900 5.900 0 1 1-1.900-5.800z",
};

/** Create a decorative icon; an element with only an icon needs an aria-label. */
export function icon(name) {
  return s("svg", { class: "glyph", viewBox: "0 0 20 20", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** Create a button with an icon and a label. */
export function button(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, icon(name), h("span", {}, label));
}

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Format a count: 1,234 or 1.2M; a dash if it is unknown. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return value < 100_000 ? whole.format(value) : short.format(value);
}

/** Format messages per second. */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value < 9.95 ? value.toFixed(1) : count(Math.round(value));
}

/** Format a duration in one suitable unit: 40 s, 3 min, 5 h, 2 d. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return "< 1 s";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5_400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3_600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** Format the time since a timestamp. */
export function ago(at, now = Date.now() / 1000) {
  return at === null || at === undefined ? "never" : `${duration(Math.max(0, now - at))} ago`;
}

/** Format a timestamp in the user's locale. */
export function timestamp(at) {
  return at === null || at === undefined ? "–" : new Date(at * 1000).toLocaleString();
}

export function bytes(size) {
  return size < 1_024 ? `${size} bytes` : `${(size / 1_024).toFixed(1)} KB`;
}

/** Format a count with its noun: “1 message”, “2 messages”. */
export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** Create a status label with a coloured dot. */
export function pill(word, severity) {
  return h("span", { class: `pill ${severity}` }, h("span", { class: "dot", "aria-hidden": "true" }), word);
}

/** Severity of each state, used as a CSS class. */
export const SEVERITY = {
  consuming: "good", standby: "good", connected: "good", closed: "good", healthy: "good",
  paused: "warn", starting: "warn", connecting: "warn", half_open: "warn", closing: "warn",
  reconnecting: "bad", disconnected: "bad", open: "bad", stopped: "bad", unhealthy: "bad",
  none: "neutral",
};

/** Show a message at the edge of the page for a few seconds. */
export function toast(text, severity = "good") {
  const element = h("p", { class: `toast ${severity}` }, text);
  const stack = document.getElementById("toasts");
  stack.append(element);
  while (stack.children.length > 3) stack.firstChild.remove();
  setTimeout(() => element.remove(), severity === "bad" ? 9_000 : 5_000);
}

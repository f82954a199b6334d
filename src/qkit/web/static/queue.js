// One queue: its figures, steering, what waits in it, and its dead letters.

import { change, get, queuePath } from "./api.js";
import { chart } from "./charts.js";
import { MOODS, ago, button, bytes, count, duration, h, moment, note, pill, say, toast } from "./elements.js";
import { letterList } from "./letters.js";
import { OWN, consumers } from "./overview.js";

const FACTS = [
  ["Waiting", (queue) => count(queue.depth)],
  ["In flight", (queue) => count(queue.in_flight)],
  ["Scheduled", (queue) => count(queue.scheduled)],
  ["Oldest", (queue) => duration(queue.oldest_seconds)],
  ["Retries", (queue) => count(queue.retried)],
  ["Failed", (queue) => count(queue.failed)],
  ["Dead letters", (queue) => count(queue.dead_letters)],
];

export function queuePage(name, tab) {
  const state = h("span");
  const steer = h("button", { type: "button", onclick: toggle, hidden: true });
  const refused = h("p", { class: "banner bad panel", hidden: true });
  const facts = FACTS.map(([label, figure]) => {
    const value = h("dd", {}, "–");
    return { figure, value, element: h("div", {}, h("dt", {}, label), value) };
  });
  const depth = chart({ title: "Waiting", series: [{ name: "messages", kind: "accent", filled: true }], format: (value) => count(value === null ? null : Math.round(value * 10) / 10) });
  const flow = chart({ title: "Traffic per second", series: [{ name: "in", kind: "in", filled: true }, { name: "done", kind: "out", filled: false }] });
  const lists = { messages: messageList(name), "dead-letters": letterList(name) };
  const shown = lists[tab];
  const deadCount = h("span", { class: "badge", hidden: true });
  const link = (to, ...label) => h("a", { href: `#/queues/${encodeURIComponent(name)}${to === "messages" ? "" : `/${to}`}`, "aria-current": to === tab ? "page" : null }, ...label);
  const people = h("div");
  const crew = h("section", { class: "panel" }, h("h2", {}, "Consumers in this process"), people);
  const missing = h("div", { class: "empty panel", hidden: true }, h("h2", {}, "No such queue"), h("p", {}, "It was deleted, or has not had its first message yet."), h("p", {}, h("a", { href: "#/" }, "All queues")));
  const content = h(
    "div", { class: "page" },
    h("dl", { class: "facts panel" }, facts.map((fact) => fact.element)),
    tab === "messages" ? h("div", { class: "charts" }, depth.element, flow.element) : null, // letters need the room
    h("nav", { class: "tabs", "aria-label": "What is in it" }, link("messages", "Next messages"), link("dead-letters", "Dead letters", deadCount)),
    shown.element, crew,
  );
  const element = h(
    "div", { class: "page" },
    h("div", { class: "heading" },
      h("div", {}, h("a", { class: "back", href: "#/" }, "← All queues"), h("h1", {}, name, " ", state)),
      h("div", { class: "actions" }, steer)),
    refused, missing, content,
  );
  let current = null, word = "";

  async function toggle() {
    const action = current.state === "paused" ? "resume" : "pause";
    try {
      const answer = await change("POST", queuePath(name, action));
      if (answer) toast(action === "pause" ? `${name} is paused in this process: running handlers finish, no more are started. Other processes go on.` : `${name} is consumed again by this process.`);
    } catch (error) { toast(error.message, "bad"); }
  }

  return {
    element,
    title: `${name} · qkit`,
    update(overview, history) {
      current = overview.queues.find((queue) => queue.name === name) ?? null;
      missing.hidden = current !== null || overview.problem !== null;
      content.hidden = current === null;
      if (!current) { state.replaceChildren(); steer.hidden = true; word = ""; return; }
      const now = current.state === "none" ? "not consumed here" : current.state;
      if (word !== now) {
        state.replaceChildren(pill(now, MOODS[current.state]));
        steer.replaceChildren(...button(current.state === "paused" ? "play" : "pause", current.state === "paused" ? "Resume" : "Pause").childNodes);
        word = now;
      }
      steer.hidden = current.state === "none";
      steer.disabled = !overview.writable;
      note(refused, current.problem ?? "");
      for (const fact of facts) say(fact.value, fact.figure(current));
      const points = history.get(name) ?? [];
      depth.draw(points.map((row) => [row[0], row[1]]), overview.at);
      flow.draw(points.map((row) => [row[0], row[2], row[3]]), overview.at);
      flow.name(current.own_rates ? `Traffic per second, ${OWN}` : "Traffic per second");
      say(deadCount, count(current.dead_letters));
      deadCount.hidden = !current.dead_letters;
      const mine = overview.health.consumers.filter((item) => item.channel === name);
      crew.hidden = mine.length === 0;
      if (mine.length) people.replaceChildren(consumers(mine, overview.at));
      shown.update(current, overview);
    },
    dispose() { shown.dispose?.(); },
  };
}

/**
 * The next messages; looked at again when their number changes and nobody reads one. Where a look
 * is emulated, by taking and giving back, only when somebody asks.
 */
function messageList(name) {
  const list = h("div", { class: "items" });
  const sender = sendForm(name, () => load());
  const element = h(
    "section", { class: "panel", "aria-label": "Next messages" },
    h("div", { class: "bar" }, h("p", { class: "hint" }, "In the order of delivery; looking takes nothing out."), button("refresh", "Look again", () => load())),
    list, sender.element,
  );
  let seen = null, busy = false, last = 0;

  async function load() {
    if (busy) return;
    busy = true;
    last = Date.now();
    try {
      const { messages } = await get(queuePath(name, "messages"), { limit: 25 });
      const open = new Set([...list.querySelectorAll("details[open]")].map((item) => item.dataset.id));
      list.replaceChildren(...(messages.length ? messages.map((message) => messageItem(message, open.has(message.id))) : [h("div", { class: "empty" }, h("h3", {}, "Nothing waits"), h("p", {}, "Whatever was sent here is done, in flight, or buried."))]));
    } catch (error) {
      list.replaceChildren(h("div", { class: "empty bad" }, h("h3", {}, "It cannot be looked into"), h("p", {}, error.message)));
    } finally { busy = false; }
  }

  return {
    element,
    update(queue, overview) {
      sender.allow(overview.writable);
      const mark = overview.capabilities.peek === "native" ? `${queue.depth} ${queue.scheduled} ${queue.handled}` : "once";
      if (mark !== seen && Date.now() - last > 1_500 && !list.querySelector("details[open]")) { seen = mark; load(); }
    },
  };
}

function messageItem(message, open) {
  return h(
    "details", { class: "item", "data-id": message.id, open },
    h("summary", {},
      h("code", { class: "id" }, message.id),
      h("span", { class: "preview" }, message.body.content.slice(0, 200)),
      h("span", { class: "meta" }, message.priority === null ? "" : `priority ${message.priority} · `, `attempt ${message.attempt}`, message.sent_at ? ` · sent ${ago(message.sent_at)}` : "")),
    bodyOf(message.body),
    headersOf(message.headers, { Key: message.key, Sent: message.sent_at && moment(message.sent_at), Expires: message.expires_at && moment(message.expires_at), Trace: message.trace_id }),
  );
}

/** A body to read: JSON laid out, text as it is, the rest in base64. */
export function bodyOf(body) {
  const text = body.format === "json" ? laidOut(body.content) : body.content;
  const kind = { json: "JSON", text: "text", base64: "bytes, in base64" }[body.format];
  return h(
    "div", { class: "body" },
    h("pre", { tabindex: 0 }, text || " "),
    h("p", { class: "hint" }, `${kind}, ${bytes(body.size)}${body.cut ? "; only its beginning is shown" : ""}`),
  );
}

/** JSON with line breaks, character by character: parsing would round long numbers. */
export function laidOut(json) {
  let text = "", depth = 0, quoted = false;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (let at = 0; at < json.length; at += 1) {
    const sign = json[at];
    if (quoted) {
      text += sign;
      if (sign === "\\") text += json[(at += 1)] ?? "";
      else if (sign === '"') quoted = false;
    } else if (/\s/.test(sign)) {
      continue;
    } else if (sign === '"') {
      quoted = true;
      text += sign;
    } else if ("{[".includes(sign)) {
      const empty = json.slice(at + 1).match(/^\s*[}\]]/);
      if (empty) { text += sign + empty[0].trim(); at += empty[0].length; }
      else { depth += 1; text += sign + line(); }
    } else if ("}]".includes(sign)) {
      depth -= 1;
      text += line() + sign;
    } else {
      text += sign === "," ? sign + line() : sign === ":" ? ": " : sign;
    }
  }
  return text;
}

/** Facts and headers of a message. */
export function headersOf(headers, facts) {
  const pairs = [...Object.entries(facts).filter(([, value]) => value), ...Object.entries(headers)];
  return h("dl", { class: "pairs" }, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

function sendForm(name, sent) {
  const body = h("textarea", { id: "send-body", rows: 4, spellcheck: "false", placeholder: '{"id": 1}', required: true });
  const priority = h("input", { id: "send-priority", type: "number", min: 0, max: 255, placeholder: "default" });
  const delay = h("input", { id: "send-delay", type: "number", min: 0, step: "any", placeholder: "none" });
  const submit = h("button", { type: "submit", class: "primary" }, "Send");
  const field = (label, input) => h("div", { class: "field" }, h("label", { for: input.id }, label), input);
  const form = h(
    "form", { class: "send" },
    field("Body, as JSON", body),
    h("div", { class: "row" }, field("Priority", priority), field("Delay in seconds", delay), submit),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const options = {};
    try { JSON.parse(body.value); } catch { toast('The body is no JSON: write {"id": 1}, "text" or 42.', "bad"); return; }
    if (priority.value) options.priority = Number(priority.value);
    if (delay.value) options.delay = Number(delay.value);
    // The body as it was written: what JSON.parse gives has long numbers rounded.
    const fields = Object.entries(options).map(([key, value]) => `, ${JSON.stringify(key)}: ${value}`);
    const message = `{"body": ${body.value}${fields.join("")}}`;
    submit.disabled = true;
    try {
      const answer = await change("POST", queuePath(name, "messages"), message);
      if (answer) { toast(`Sent as ${answer.message_id}.`); sent(); }
    } catch (error) { toast(error.message, "bad"); } finally { submit.disabled = false; }
  });
  const element = h("details", { class: "more" }, h("summary", {}, "Send a message"), form);
  return { element, allow(writable) { element.hidden = !writable; } };
}

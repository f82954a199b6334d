// The page of a queue: statistics, pause and resume, next messages, dead letters.

import { change, get, queuePath } from "./api.js";
import { chart } from "./charts.js";
import { SEVERITY, ago, button, bytes, count, duration, h, pill, setNote, setText, timestamp, toast } from "./elements.js";
import { deadLetterList } from "./dead_letters.js";
import { SERVICE_ONLY, consumers } from "./overview.js";

const FACTS = [
  ["Depth", (queue) => count(queue.depth)],
  ["In flight", (queue) => count(queue.in_flight)],
  ["Scheduled", (queue) => count(queue.scheduled)],
  ["Oldest", (queue) => duration(queue.oldest_message_age_secs)],
  ["Retried", (queue) => count(queue.messages_retried)],
  ["Failed", (queue) => count(queue.messages_failed)],
  ["Dead letters", (queue) => count(queue.dead_letters)],
];

export function queuePage(name, tab) {
  const state = h("span");
  const pauseButton = h("button", { type: "button", onclick: toggle, hidden: true });
  const errorBanner = h("p", { class: "banner bad panel", hidden: true });
  const facts = FACTS.map(([label, figure]) => {
    const value = h("dd", {}, "–");
    return { figure, value, element: h("div", {}, h("dt", {}, label), value) };
  });
  const depth = chart({ title: "Depth", series: [{ name: "messages", kind: "accent", filled: true }], format: (value) => count(value === null ? null : Math.round(value * 10) / 10) });
  const rates = chart({ title: "Messages/s", series: [{ name: "published", kind: "published", filled: true }, { name: "acked", kind: "acked", filled: false }] });
  const lists = { messages: messageList(name), "dead-letters": deadLetterList(name) };
  const shown = lists[tab];
  const deadLetterCount = h("span", { class: "badge", hidden: true });
  const link = (to, ...label) => h("a", { href: `#/queues/${encodeURIComponent(name)}${to === "messages" ? "" : `/${to}`}`, "aria-current": to === tab ? "page" : null }, ...label);
  const consumerList = h("div");
  const consumerPanel = h("section", { class: "panel" }, h("h2", {}, "Consumers in this process"), consumerList);
  const missing = h("div", { class: "empty panel", hidden: true }, h("h2", {}, "No such queue"), h("p", {}, "It was deleted, or it has not received a message yet."), h("p", {}, h("a", { href: "#/" }, "All queues")));
  const content = h(
    "div", { class: "page" },
    h("dl", { class: "facts panel" }, facts.map((fact) => fact.element)),
    tab === "messages" ? h("div", { class: "charts" }, depth.element, rates.element) : null, // dead letters need the space
    h("nav", { class: "tabs", "aria-label": "Contents" }, link("messages", "Next messages"), link("dead-letters", "Dead letters", deadLetterCount)),
    shown.element, consumerPanel,
  );
  const element = h(
    "div", { class: "page" },
    h("div", { class: "heading" },
      h("div", {}, h("a", { class: "back", href: "#/" }, "← All queues"), h("h1", {}, name, " ", state)),
      h("div", { class: "actions" }, pauseButton)),
    errorBanner, missing, content,
  );
  let current = null, label = "";

  async function toggle() {
    const action = current.state === "paused" ? "resume" : "pause";
    try {
      const result = await change("POST", queuePath(name, action));
      if (result) toast(action === "pause" ? `${name} is paused in this process: running handlers finish, and no new handlers start. Other processes continue.` : `${name} is resumed in this process.`);
    } catch (error) { toast(error.message, "bad"); }
  }

  return {
    element,
    title: `${name} · qkit`,
    update(overview, history) {
      current = overview.queues.find((queue) => queue.name === name) ?? null;
      missing.hidden = current !== null || overview.error !== null;
      content.hidden = current === null;
      if (!current) { state.replaceChildren(); pauseButton.hidden = true; label = ""; return; }
      const now = current.state === "none" ? "not consumed here" : current.state;
      if (label !== now) {
        state.replaceChildren(pill(now, SEVERITY[current.state]));
        pauseButton.replaceChildren(...button(current.state === "paused" ? "play" : "pause", current.state === "paused" ? "Resume" : "Pause").childNodes);
        label = now;
      }
      pauseButton.hidden = current.state === "none";
      pauseButton.disabled = !overview.writable;
      setNote(errorBanner, current.error ?? "");
      for (const fact of facts) setText(fact.value, fact.figure(current));
      const points = history.get(name) ?? [];
      depth.draw(points.map((row) => [row[0], row[1]]), overview.sampled_at);
      rates.draw(points.map((row) => [row[0], row[2], row[3]]), overview.sampled_at);
      rates.setTitle(current.counted_by_service ? `Messages/s, ${SERVICE_ONLY}` : "Messages/s");
      setText(deadLetterCount, count(current.dead_letters));
      deadLetterCount.hidden = !current.dead_letters;
      const own = overview.health.consumers.filter((item) => item.channel === name);
      consumerPanel.hidden = own.length === 0;
      if (own.length) consumerList.replaceChildren(consumers(own, overview.sampled_at));
      shown.update(current, overview);
    },
    dispose() { shown.dispose?.(); },
  };
}

const HINT = "In delivery order. Messages are not consumed.";

/**
 * Create the list of the next messages. It reloads when the statistics change, unless a message is open.
 * If the backend emulates peek (by receiving and releasing messages), it reloads only on request.
 */
function messageList(name) {
  const list = h("div", { class: "items" });
  const hint = h("p", { class: "hint" }, HINT);
  const sender = sendForm(name, () => load());
  const element = h(
    "section", { class: "panel", "aria-label": "Next messages" },
    h("div", { class: "bar" }, hint, button("refresh", "Reload", () => load())),
    list, sender.element,
  );
  let seen = null, busy = false, last = 0;

  async function load() {
    if (busy) return;
    busy = true;
    last = Date.now();
    try {
      const { messages, truncated } = await get(queuePath(name, "messages"), { limit: 25 });
      setText(hint, truncated ? `${HINT} Only the first are shown, because they are large.` : HINT);
      const open = new Set([...list.querySelectorAll("details[open]")].map((item) => item.dataset.id));
      list.replaceChildren(...(messages.length ? messages.map((message) => messageItem(message, open.has(message.id))) : [h("div", { class: "empty" }, h("h3", {}, "No messages"), h("p", {}, "No message is ready for a consumer."))]));
    } catch (error) {
      list.replaceChildren(h("div", { class: "empty bad" }, h("h3", {}, "Cannot read the messages"), h("p", {}, error.message)));
    } finally { busy = false; }
  }

  return {
    element,
    update(queue, overview) {
      sender.allow(overview.writable);
      const key = overview.capabilities.peek === "native" ? `${queue.depth} ${queue.scheduled} ${queue.acked_total}` : "once";
      if (key !== seen && Date.now() - last > 1_500 && !list.querySelector("details[open]")) { seen = key; load(); }
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
    bodyElement(message.body),
    headerElement(message.headers, { Key: message.key, Sent: message.sent_at && timestamp(message.sent_at), Expires: message.expires_at && timestamp(message.expires_at), Trace: message.trace_id }),
  );
}

/** Show a body: JSON indented, text unchanged, other bytes as base64. */
export function bodyElement(body) {
  const text = body.format === "json" ? indented(body.content) : body.content;
  const kind = { json: "JSON", text: "text", base64: "bytes, in base64" }[body.format];
  return h(
    "div", { class: "body" },
    h("pre", { tabindex: 0 }, text || " "),
    h("p", { class: "hint" }, `${kind}, ${bytes(body.size)}${body.truncated ? "; truncated" : ""}`),
  );
}

/** Indent JSON character by character, because parsing would round long numbers. */
export function indented(json) {
  let text = "", depth = 0, quoted = false;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (let at = 0; at < json.length; at += 1) {
    const character = json[at];
    if (quoted) {
      text += character;
      if (character === "\\") text += json[(at += 1)] ?? "";
      else if (character === '"') quoted = false;
    } else if (/\s/.test(character)) {
      continue;
    } else if (character === '"') {
      quoted = true;
      text += character;
    } else if ("{[".includes(character)) {
      const empty = json.slice(at + 1).match(/^\s*[}\]]/);
      if (empty) { text += character + empty[0].trim(); at += empty[0].length; }
      else { depth += 1; text += character + line(); }
    } else if ("}]".includes(character)) {
      depth -= 1;
      text += line() + character;
    } else {
      text += character === "," ? character + line() : character === ":" ? ": " : character;
    }
  }
  return text;
}

/** Show the properties and headers of a message. */
export function headerElement(headers, facts) {
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
    field("Body (JSON)", body),
    h("div", { class: "row" }, field("Priority", priority), field("Delay (seconds)", delay), submit),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const options = {};
    try { JSON.parse(body.value); } catch { toast('The body is not JSON: write {"id": 1}, "text" or 42.', "bad"); return; }
    if (priority.value) options.priority = Number(priority.value);
    if (delay.value) options.delay = Number(delay.value);
    // Send the body as written, because JSON.parse rounds long numbers.
    const fields = Object.entries(options).map(([key, value]) => `, ${JSON.stringify(key)}: ${value}`);
    const message = `{"body": ${body.value}${fields.join("")}}`;
    submit.disabled = true;
    try {
      const result = await change("POST", queuePath(name, "messages"), message);
      if (result) { toast(`Sent as ${result.message_id}.`); sent(); }
    } catch (error) { toast(error.message, "bad"); } finally { submit.disabled = false; }
  });
  const element = h("details", { class: "more" }, h("summary", {}, "Send a message"), form);
  return { element, allow(writable) { element.hidden = !writable; } };
}

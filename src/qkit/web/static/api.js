// Asking the service, and the token that a change needs. It stays in this tab.

import { button, h, note } from "./elements.js";

const base = new URL(".", document.baseURI);
const KEY = "qkit-token";

export function stream() {
  return new EventSource(new URL("api/events", base));
}

export function queuePath(name, ...rest) {
  return ["api/queues", encodeURIComponent(name), ...rest].join("/");
}

/** What the service answers, or an error with its words. */
export async function get(path, parameters = {}) {
  const url = new URL(path, base);
  for (const [name, value] of Object.entries(parameters)) if (value) url.searchParams.set(name, value);
  return read(await reach(url, {}));
}

/** A change: asks for the token if there is none yet, or another if it is refused. Text is sent as it is. */
export async function change(method, path, body) {
  let complaint = "";
  for (;;) {
    const token = sessionStorage.getItem(KEY) ?? (await askForToken(complaint));
    if (token === null) return null;
    const answer = await reachWith(token, method, path, body);
    if (answer.status !== 401) return read(answer);
    forgetToken();
    complaint = "The token that was right is no more.";
  }
}

function reachWith(token, method, path, body) {
  const headers = { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return reach(new URL(path, base), { method, headers, body: body === undefined || typeof body === "string" ? body : JSON.stringify(body) });
}

async function reach(url, options) {
  try {
    return await fetch(url, { ...options, cache: "no-store" });
  } catch {
    throw new Error("The service does not answer.");
  }
}

async function read(answer) {
  let content = null;
  try { content = await answer.json(); } catch { /* no JSON: the status says enough */ }
  if (answer.ok) return content;
  throw new Error(content?.error?.message ?? `The service answered ${answer.status}.`);
}

export const hasToken = () => sessionStorage.getItem(KEY) !== null;
let tellToken = () => {};
export function onToken(listener) { tellToken = listener; }

export function forgetToken() {
  sessionStorage.removeItem(KEY);
  tellToken();
}

/** The right token, which the service was asked about, or null. */
export function askForToken(complaint = "") {
  return new Promise((resolve) => {
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-wrong" });
    const wrong = h("p", { class: "complaint", id: "token-wrong", role: "alert" });
    const unlock = h("button", { type: "submit", class: "primary" }, "Unlock");
    const form = h(
      "form", {},
      h("h2", {}, "Unlock changes"),
      h("p", {}, "Looking is free. To pause, send, replay or purge, enter the token that the service was started with."),
      h("label", { for: "token" }, "Token"), field, wrong,
      h("p", { class: "hint" }, "It is kept in this tab only."),
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), unlock),
    );
    const dialog = h("dialog", { "aria-label": "Unlock changes" }, form);
    let given = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      unlock.disabled = true;
      note(wrong, "");
      try {
        const answer = await reachWith(field.value.trim(), "POST", "api/token");
        if (answer.status === 401) throw new Error("That token is not the right one.");
        await read(answer);
        given = field.value.trim();
        dialog.close();
      } catch (error) {
        note(wrong, error.message);
        field.select();
      } finally { unlock.disabled = false; }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (given) sessionStorage.setItem(KEY, given);
      tellToken();
      resolve(given);
    });
    document.body.append(dialog);
    dialog.showModal();
    field.focus();
    note(wrong, complaint);
  });
}

/** A question before something is destroyed; the safe answer has the focus. */
export function confirm({ title, text, action }) {
  return new Promise((resolve) => {
    let yes = false;
    const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Keep them");
    const dialog = h(
      "dialog", { "aria-label": title },
      h("h2", {}, title), h("p", {}, text),
      h("div", { class: "actions" }, cancel,
        button("trash", action, () => { yes = true; dialog.close(); }, { class: "danger" })),
    );
    dialog.addEventListener("close", () => { dialog.remove(); resolve(yes); });
    document.body.append(dialog);
    dialog.showModal();
    cancel.focus();
  });
}

// Requests to the service, and the token that changes require. The token is kept in this tab only.

import { button, h, setNote } from "./elements.js";

const base = new URL(".", document.baseURI);
const TOKEN_KEY = "qkit-token";

export function stream() {
  return new EventSource(new URL("api/events", base));
}

export function queuePath(name, ...rest) {
  return ["api/queues", encodeURIComponent(name), ...rest].join("/");
}

/** Return the JSON response; throw an Error with the service's message if the request fails. */
export async function get(path, parameters = {}) {
  const url = new URL(path, base);
  for (const [name, value] of Object.entries(parameters)) if (value) url.searchParams.set(name, value);
  return parse(await request(url, {}));
}

/** Send a change. Ask for the token if there is none or if it is rejected. A string body is sent unchanged. */
export async function change(method, path, body) {
  let reason = "";
  for (;;) {
    const token = sessionStorage.getItem(TOKEN_KEY) ?? (await askForToken(reason));
    if (token === null) return null;
    const response = await requestWith(token, method, path, body);
    if (response.status !== 401) return parse(response);
    forgetToken();
    reason = "The token is no longer valid.";
  }
}

function requestWith(token, method, path, body) {
  const headers = { Authorization: `Bearer ${token}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  return request(new URL(path, base), { method, headers, body: body === undefined || typeof body === "string" ? body : JSON.stringify(body) });
}

async function request(url, options) {
  try {
    return await fetch(url, { ...options, cache: "no-store" });
  } catch {
    throw new Error("The service does not respond.");
  }
}

async function parse(response) {
  let content = null;
  try { content = await response.json(); } catch { /* not JSON: report the status */ }
  if (response.ok) return content;
  throw new Error(content?.error?.message ?? `The service responded with status ${response.status}.`);
}

export const hasToken = () => sessionStorage.getItem(TOKEN_KEY) !== null;
let tokenChanged = () => {};
export function onToken(listener) { tokenChanged = listener; }

export function forgetToken() {
  sessionStorage.removeItem(TOKEN_KEY);
  tokenChanged();
}

/** Ask for the token and check it with the service; return it, or null if the user cancels. */
export function askForToken(reason = "") {
  return new Promise((resolve) => {
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-error" });
    const error = h("p", { class: "form-error", id: "token-error", role: "alert" });
    const unlock = h("button", { type: "submit", class: "primary" }, "Unlock");
    const form = h(
      "form", {},
      h("h2", {}, "Unlock changes"),
      h("p", {}, "Reading needs no token. To pause, send, replay or purge, enter the service's token."),
      h("label", { for: "token" }, "Token"), field, error,
      h("p", { class: "hint" }, "The token is kept in this tab only."),
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), unlock),
    );
    const dialog = h("dialog", { "aria-label": "Unlock changes" }, form);
    let token = null;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      unlock.disabled = true;
      setNote(error, "");
      try {
        const response = await requestWith(field.value.trim(), "POST", "api/token");
        if (response.status === 401) throw new Error("The token is invalid.");
        await parse(response);
        token = field.value.trim();
        dialog.close();
      } catch (failure) {
        setNote(error, failure.message);
        field.select();
      } finally { unlock.disabled = false; }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (token) sessionStorage.setItem(TOKEN_KEY, token);
      tokenChanged();
      resolve(token);
    });
    document.body.append(dialog);
    dialog.showModal();
    field.focus();
    setNote(error, reason);
  });
}

/** Ask for confirmation before a deletion; the Cancel button has the focus. */
export function confirm({ title, text, action }) {
  return new Promise((resolve) => {
    let confirmed = false;
    const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const dialog = h(
      "dialog", { "aria-label": title },
      h("h2", {}, title), h("p", {}, text),
      h("div", { class: "actions" }, cancel,
        button("trash", action, () => { confirmed = true; dialog.close(); }, { class: "danger" })),
    );
    dialog.addEventListener("close", () => { dialog.remove(); resolve(confirmed); });
    document.body.append(dialog);
    dialog.showModal();
    cancel.focus();
  });
}

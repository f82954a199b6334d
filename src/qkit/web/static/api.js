// Requests to the service, and the tokens that they need. Tokens are kept in this tab only.

import { button, h, setNote } from "./elements.js";

const base = new URL(".", document.baseURI);
// The token for changes permits everything; the read token stays when the user locks changes.
const TOKEN_KEYS = { all: "qkit-token", read: "qkit-read-token" };
const RECONNECT_MILLISECONDS = 1_000;

/** Call `handlers[name](data)` for each event of the stream, for ever; reconnect when it ends. */
export async function listen(handlers) {
  for (;;) {
    try {
      const response = await authorized("api/events");
      if (response.status === 401) { await signIn(); continue; }
      if (response.ok) await readEvents(response.body, handlers);
    } catch { /* no response: try again */ }
    await new Promise((resolve) => setTimeout(resolve, RECONNECT_MILLISECONDS));
  }
}

// EventSource cannot send a token, so the stream is read with fetch.
async function readEvents(body, handlers) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (fields.data) handlers[fields.event]?.(JSON.parse(fields.data));
    }
  }
}

export function queuePath(name, ...rest) {
  return ["api/queues", encodeURIComponent(name), ...rest].join("/");
}

/** Return the JSON response; throw an Error with the service's message if the request fails. */
export async function get(path, parameters = {}) {
  const url = new URL(path, base);
  for (const [name, value] of Object.entries(parameters)) if (value) url.searchParams.set(name, value);
  for (;;) {
    const response = await authorized(url);
    if (response.status !== 401) return parse(response);
    await signIn();
  }
}

/** Send a change. Ask for the token if there is none or if it is rejected. A string body is sent unchanged. */
export async function change(method, path, body) {
  let reason = "";
  for (;;) {
    const token = sessionStorage.getItem(TOKEN_KEYS.all) ?? (await askForToken("all", reason));
    if (token === null) return null;
    const response = await requestWith(token, method, path, body);
    const denied = response.status === 403 && (await response.clone().json().catch(() => null))?.error?.type === "ReadTokenOnly";
    if (response.status !== 401 && !denied) return parse(response);
    forgetToken();
    reason = "The token is no longer valid.";
  }
}

/** Open a document of the service, such as /health, in a new tab. A link could not send the token. */
export async function openDocument(path) {
  const response = await authorized(path);
  if (!response.ok && response.status !== 503) return parse(response); // /health reports with 503
  window.open(URL.createObjectURL(await response.blob()), "_blank");
}

/** Send a GET request with the token, if there is one. */
function authorized(path) {
  const token = sessionStorage.getItem(TOKEN_KEYS.all) ?? sessionStorage.getItem(TOKEN_KEYS.read);
  return token === null ? request(new URL(path, base), {}) : requestWith(token, "GET", path);
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

export const hasToken = () => sessionStorage.getItem(TOKEN_KEYS.all) !== null;
export const hasAnyToken = () => hasToken() || sessionStorage.getItem(TOKEN_KEYS.read) !== null;
let tokenChanged = () => {};
export function onToken(listener) { tokenChanged = listener; }

export function forgetToken() {
  sessionStorage.removeItem(TOKEN_KEYS.all);
  tokenChanged();
}

let signingIn = null;

/** Ask for a token that permits reading, until one is given; all requests share one dialog. */
async function signIn() {
  if (hasToken() && sessionStorage.getItem(TOKEN_KEYS.read) !== null) return forgetToken(); // try the read token
  signingIn ??= (async () => {
    const known = hasAnyToken();
    for (const key of Object.values(TOKEN_KEYS)) sessionStorage.removeItem(key);
    tokenChanged();
    while ((await askForToken("read", known ? "The token is no longer valid." : "")) === null);
    signingIn = null;
  })();
  return signingIn;
}

const DIALOGS = {
  read: { title: "Sign in", text: "Enter a token of the service. The read token permits reading; the token for changes permits everything.", action: "Sign in" },
  all: { title: "Unlock changes", text: "To pause, send, replay or purge, enter the service's token for changes.", action: "Unlock" },
};

/** Ask for a token and check it with the service; return it, or null if the user cancels. */
export function askForToken(purpose, reason = "") {
  return new Promise((resolve) => {
    const { title, text, action } = DIALOGS[purpose];
    const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-error" });
    const error = h("p", { class: "form-error", id: "token-error", role: "alert" });
    const submit = h("button", { type: "submit", class: "primary" }, action);
    const cancel = purpose === "all" ? h("button", { type: "button", onclick: () => dialog.close() }, "Cancel") : null;
    const form = h(
      "form", {},
      h("h2", {}, title),
      h("p", {}, text),
      h("label", { for: "token" }, "Token"), field, error,
      h("p", { class: "hint" }, "The token is kept in this tab only."),
      h("div", { class: "actions" }, cancel, submit),
    );
    const dialog = h("dialog", { "aria-label": title, "data-purpose": purpose }, form);
    let token = null, access = purpose;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      submit.disabled = true;
      setNote(error, "");
      try {
        const response = await requestWith(field.value.trim(), "GET", "api/token");
        if (response.status === 401) throw new Error("The token is invalid.");
        ({ access } = await parse(response));
        if (purpose === "all" && access !== "all") throw new Error("This token permits reading only.");
        token = field.value.trim();
        dialog.close();
      } catch (failure) {
        setNote(error, failure.message);
        field.select();
      } finally { submit.disabled = false; }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (token) sessionStorage.setItem(TOKEN_KEYS[access], token);
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

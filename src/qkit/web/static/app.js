// Entry point: routing, live statistics, and the header and footer of every page.

import { askForToken, forgetToken, hasAnyToken, hasToken, listen, onToken, openDocument } from "./api.js";
import { SEVERITY, h, icon, pill, toast } from "./elements.js";
import { addPoints } from "./history.js";
import { overviewPage } from "./overview.js";
import { queuePage } from "./queue.js";

const main = document.getElementById("main");
const history = new Map();
let overview = null, page = null, route = null, lastEventAt = Date.now();

// -- pages ------------------------------------------------------------------------------------

function open() {
  if (page && location.hash && !location.hash.startsWith("#/")) return; // an anchor on this page
  const [, queues, name, tab] = location.hash.split("/");
  const wanted = queues === "queues" && name ? `${name}/${tab === "dead-letters" ? tab : "messages"}` : "";
  if (route === wanted && page) return;
  const first = route === null;
  route = wanted;
  page?.dispose?.();
  page = wanted ? queuePage(decoded(name), wanted.slice(name.length + 1)) : overviewPage();
  document.title = page.title;
  main.replaceChildren(page.element);
  if (overview) page.update(overview, history);
  if (!first) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

/** Decode a queue name from the address; return it unchanged if its encoding is invalid. */
function decoded(name) {
  try { return decodeURIComponent(name); } catch { return name; }
}

addEventListener("hashchange", open);

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // keep the address unchanged
  main.focus();
});

// -- live statistics --------------------------------------------------------------------------

const events = {
  history(points) {
    history.clear();
    for (const [name, rows] of Object.entries(points)) history.set(name, rows);
  },
  overview(sample) {
    overview = sample;
    lastEventAt = Date.now();
    addPoints(history, overview);
    page?.update(overview, history);
    drawFrame();
  },
};

setInterval(drawFrame, 1_000);

// -- header, banner and footer ----------------------------------------------------------------

let drawn = "";

function drawFrame() {
  const signedOut = document.querySelector("dialog[data-purpose=read]") !== null;
  const stale = !signedOut && Date.now() - lastEventAt > 4_000;
  document.body.classList.toggle("stale", stale);
  const state = signedOut ? ["signed out", "neutral"] : serviceState(stale);
  const warning = currentWarning(stale);
  const key = JSON.stringify([state, warning, overview?.writable, hasToken()]);
  if (key === drawn) return;
  drawn = key;
  document.getElementById("service-state").replaceChildren(pill(...state), overview ? h("span", { class: "backend" }, overview.backend) : "");
  document.getElementById("banner").replaceChildren(warning ? h("p", { class: `banner ${warning.severity}` }, h("b", {}, warning.title), " ", warning.text) : "");
  drawTokenButton();
}

function serviceState(stale) {
  if (stale) return ["no response", "bad"];
  if (!overview) return ["connecting", "warn"];
  if (overview.stopping) return ["shutting down", "warn"];
  return overview.ready ? ["ready", "good"] : ["not ready", "bad"];
}

function currentWarning(stale) {
  if (stale) return { severity: "bad", title: "The service does not respond.", text: "It has stopped, or its event loop is blocked. This page shows the last known statistics and keeps trying to reconnect." };
  if (!overview) return null;
  if (overview.stopping) return { severity: "warn", title: "The service is shutting down.", text: "Running handlers finish; no new handlers start." };
  const { connection_state: connection, last_error: error } = overview.health;
  if (connection !== "connected" || overview.error) return { severity: SEVERITY[connection] === "warn" ? "warn" : "bad", title: "The broker cannot be reached.", text: overview.error ?? error ?? `The connection is ${connection}.` };
  return null;
}

const tokenButton = document.getElementById("token-button");
tokenButton.addEventListener("click", () => {
  if (overview && !overview.writable) return;
  if (hasToken()) forgetToken(); else askForToken("all");
});
onToken(() => { drawn = ""; drawFrame(); });

function drawTokenButton() {
  tokenButton.hidden = !overview;
  if (!overview) return;
  const label = !overview.writable ? "Read-only" : hasToken() ? "Lock" : "Unlock";
  tokenButton.disabled = !overview.writable;
  tokenButton.title = !overview.writable ? "The service has no token for changes, so changes are disabled." : "";
  tokenButton.replaceChildren(icon(hasToken() && overview.writable ? "unlock" : "lock"), h("span", {}, label));
  document.getElementById("foot-note").textContent = overview.writable ? "" : "Read-only: start the service with a token (QKIT_TOKEN) to pause, send, replay or purge.";
}

for (const link of document.querySelectorAll(".foot a")) {
  link.addEventListener("click", (event) => {
    if (!hasAnyToken()) return; // a plain link works
    event.preventDefault();
    openDocument(link.getAttribute("href")).catch((error) => toast(error.message, "bad"));
  });
}

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme-button");
let theme = localStorage.getItem("qkit-theme") ?? "auto";

function applyTheme() {
  document.documentElement.dataset.theme = theme;
  themeButton.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  themeButton.setAttribute("aria-label", `Colours: ${theme === "auto" ? "automatic" : theme}`);
}

themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("qkit-theme", theme);
  applyTheme();
});

applyTheme();
listen(events); // first, so that live statistics arrive even if opening the page fails
open();
drawFrame();

// The frame: live figures in, the right page out, and what stands around every page.

import { askForToken, forgetToken, hasToken, onToken, stream } from "./api.js";
import { MOODS, h, icon, pill } from "./elements.js";
import { remember } from "./history.js";
import { overviewPage } from "./overview.js";
import { queuePage } from "./queue.js";

const main = document.getElementById("main");
const history = new Map();
let overview = null, page = null, route = null, heardAt = Date.now();

// -- pages ------------------------------------------------------------------------------------

function open() {
  if (page && location.hash && !location.hash.startsWith("#/")) return; // a place on this page
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

/** A name out of the address; one that was never encoded as it should be is taken as it is. */
function decoded(name) {
  try { return decodeURIComponent(name); } catch { return name; }
}

addEventListener("hashchange", open);

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address stays that of the page
  main.focus();
});

// -- live figures -----------------------------------------------------------------------------

function listen() {
  const source = stream();
  source.addEventListener("history", (event) => {
    history.clear();
    for (const [name, points] of Object.entries(JSON.parse(event.data))) history.set(name, points);
  });
  source.addEventListener("overview", (event) => {
    overview = JSON.parse(event.data);
    heardAt = Date.now();
    remember(history, overview);
    page?.update(overview, history);
    frame();
  });
  source.addEventListener("error", () => {
    // A browser asks again by itself unless the answer was a refusal.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2_000);
  });
}

setInterval(frame, 1_000);

// -- around every page ------------------------------------------------------------------------

let told = "";

function frame() {
  const silent = Date.now() - heardAt > 4_000;
  document.body.classList.toggle("stale", silent);
  const state = serviceState(silent);
  const problem = trouble(silent);
  const mark = JSON.stringify([state, problem, overview?.writable, hasToken()]);
  if (mark === told) return;
  told = mark;
  document.getElementById("service-state").replaceChildren(pill(...state), overview ? h("span", { class: "backend" }, overview.backend) : "");
  document.getElementById("banner").replaceChildren(problem ? h("p", { class: `banner ${problem.mood}` }, h("b", {}, problem.title), " ", problem.text) : "");
  showToken();
}

function serviceState(silent) {
  if (silent) return ["no answer", "bad"];
  if (!overview) return ["connecting", "warn"];
  if (overview.stopping) return ["shutting down", "warn"];
  return overview.ready ? ["ready", "good"] : ["not ready", "bad"];
}

function trouble(silent) {
  if (silent) return { mood: "bad", title: "The service does not answer.", text: "It ended, or its event loop is blocked. The figures are the last that were seen; this page keeps trying." };
  if (!overview) return null;
  if (overview.stopping) return { mood: "warn", title: "The service is shutting down.", text: "Running handlers finish; no more are started." };
  const { connection_state: connection, last_error: error } = overview.health;
  if (connection !== "connected" || overview.problem) return { mood: MOODS[connection] === "warn" ? "warn" : "bad", title: "The broker cannot be reached.", text: overview.problem ?? error ?? `The connection is ${connection}.` };
  return null;
}

const tokenButton = document.getElementById("token-button");
tokenButton.addEventListener("click", () => {
  if (overview && !overview.writable) return;
  if (hasToken()) forgetToken(); else askForToken();
});
onToken(() => { told = ""; frame(); });

function showToken() {
  tokenButton.hidden = !overview;
  if (!overview) return;
  const word = !overview.writable ? "Read-only" : hasToken() ? "Lock" : "Unlock";
  tokenButton.disabled = !overview.writable;
  tokenButton.title = !overview.writable ? "The service was started without a token, so nothing can be changed here." : "";
  tokenButton.replaceChildren(icon(hasToken() && overview.writable ? "unlock" : "lock"), h("span", {}, word));
  document.getElementById("foot-note").textContent = overview.writable ? "" : "Read-only: start the service with a token (QKIT_TOKEN) to pause, send, replay or purge here.";
}

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme-button");
let theme = localStorage.getItem("qkit-theme") ?? "auto";

function showTheme() {
  document.documentElement.dataset.theme = theme;
  themeButton.replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
  themeButton.setAttribute("aria-label", `Colours: ${theme === "auto" ? "automatic" : theme}`);
}

themeButton.addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("qkit-theme", theme);
  showTheme();
});

showTheme();
listen(); // first: figures come also to a page that cannot be opened
open();
frame();

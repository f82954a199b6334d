// The dead letters of a queue: filter, read, replay one or many, purge.

import { change, confirm, get, queuePath } from "./api.js";
import { ago, button, count, h, moment, plural, toast } from "./elements.js";
import { bodyOf, headersOf } from "./queue.js";

const REASONS = ["MaxRetriesExceeded", "ExplicitNack", "TTLExpired", "Undecodable"];
const LIMIT = 100;

export function letterList(name) {
  const path = queuePath(name, "dead-letters");
  const reason = h("select", { id: "reason", onchange: () => load() }, h("option", { value: "" }, "any"), REASONS.map((word) => h("option", { value: word }, word)));
  const error = h("input", { id: "error", type: "search", placeholder: "type, or a part of the text", oninput: later });
  const all = h("input", { type: "checkbox", id: "all", onchange: () => { for (const box of boxes()) box.checked = all.checked; tell(); } });
  const chosen = h("label", { for: "all", class: "chosen" }, "Select all");
  const replay = button("replay", "Replay all", () => run("replay"), { class: "primary" });
  const purge = button("trash", "Purge all…", () => run("purge"), { class: "danger quiet" });
  const list = h("div", { class: "items", tabindex: -1 });
  const bar = h("div", { class: "bar" }, h("span", { class: "choose" }, all, chosen), h("span", { class: "actions" }, replay, purge));
  const element = h(
    "section", { class: "panel", "aria-label": "Dead letters" },
    h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); load(); } },
      h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
      h("div", { class: "field grow" }, h("label", { for: "error" }, "Error"), error)),
    bar, list,
  );
  let seen = null, timer = null, letters = [], writable = false, asked = 0, total = 0, lookedAt = 0;

  const boxes = () => [...list.querySelectorAll("input[type=checkbox]")];
  const picked = () => boxes().filter((box) => box.checked).map((box) => box.value);
  const filter = () => ({ reason: reason.value, error: error.value.trim() });
  const filtered = () => Boolean(reason.value || error.value.trim());

  function later() { clearTimeout(timer); timer = setTimeout(load, 250); }

  function tell() {
    const ids = picked();
    const what = ids.length ? `${count(ids.length)} selected` : filtered() ? "all that match" : "all";
    replay.lastChild.textContent = `Replay ${what}`;
    purge.lastChild.textContent = `Purge ${what}…`;
    replay.disabled = purge.disabled = !writable || letters.length === 0;
    chosen.textContent = letters.length === LIMIT && total > LIMIT && !filtered() ? `Select the first ${count(letters.length)} of ${count(total)}` : "Select all";
    all.disabled = letters.length === 0;
    all.checked = ids.length > 0 && ids.length === letters.length;
    all.indeterminate = ids.length > 0 && ids.length < letters.length;
  }

  async function load() {
    const turn = ++asked;
    const kept = new Set(picked());
    const open = new Set([...list.querySelectorAll("details[open]")].map((item) => item.dataset.id));
    try {
      const answer = await get(path, { limit: LIMIT, ...filter() });
      if (turn !== asked) return;
      letters = answer.dead_letters;
      const refocus = focused();
      list.replaceChildren(...(letters.length ? letters.map((letter) => letterItem(letter, kept, open)) : [emptyList()]));
      refocus();
    } catch (problem) {
      if (turn !== asked) return;
      letters = [];
      list.replaceChildren(h("div", { class: "empty bad" }, h("h3", {}, "They cannot be read"), h("p", {}, problem.message)));
    }
    if (letters.length === 0 && bar.contains(document.activeElement)) list.focus();
    bar.hidden = letters.length === 0;
    tell();
  }

  /** What gives the keyboard its place again: the same letter, or the one that came in its stead. */
  function focused() {
    const item = document.activeElement.closest?.(".item");
    if (!item || !list.contains(item)) return () => {};
    const { id } = item.querySelector("details").dataset;
    const place = [...list.children].indexOf(item);
    return () => {
      const summaries = [...list.querySelectorAll("summary")];
      const same = summaries.find((summary) => summary.parentNode.dataset.id === id);
      (same ?? summaries[place] ?? summaries.at(-1) ?? list).focus();
    };
  }

  function emptyList() {
    return filtered()
      ? h("div", { class: "empty" }, h("h3", {}, "None match"), h("p", {}, "Other reasons, or other words of the error, may."))
      : h("div", { class: "empty good" }, h("h3", {}, "No dead letters"), h("p", {}, "Nothing has failed for good here."));
  }

  function letterItem(letter, kept, open) {
    return h(
      "div", { class: "item choice" },
      h("input", { type: "checkbox", value: letter.id, checked: kept.has(letter.id), "aria-label": `Select ${letter.id}`, onchange: tell }),
      h("details", { "data-id": letter.id, open: open.has(letter.id) },
        h("summary", {},
          h("span", { class: "tag" }, letter.reason),
          h("span", { class: "preview" }, [letter.error_type, letter.error].filter(Boolean).join(": ") || "no error was recorded"),
          h("span", { class: "meta" }, `${plural(letter.attempts, "attempt")} · failed ${ago(letter.last_failed_at)}`)),
        bodyOf(letter.body),
        headersOf(letter.headers, {
          Id: letter.id, Group: letter.group, Key: letter.key, Sent: letter.sent_at && moment(letter.sent_at),
          "First failed": moment(letter.first_failed_at), "Last failed": moment(letter.last_failed_at), Trace: letter.trace_id,
        }),
        h("div", { class: "actions" },
          button("replay", "Replay this one", () => apply("replay", [letter.id]), { disabled: !writable }),
          button("trash", "Purge this one…", () => apply("purge", [letter.id]), { disabled: !writable, class: "danger quiet" }))),
    );
  }

  const run = (action) => apply(action, picked());

  /** What a purge deletes, in words and as a query. What fails after the question is never in it. */
  async function doomed(ids) {
    if (ids.length) return { which: plural(ids.length, "dead letter"), query: ids.map((id) => ["id", id]) };
    const until = lookedAt;
    await load(); // so that the question is about all that there are
    const chosen = Object.entries(filter()).filter(([, value]) => value);
    const which = (number) => (filtered() ? `${number} that match` : `all ${number}`);
    if (letters.length < LIMIT) return { which: which(plural(letters.length, "dead letter")), query: [...chosen, ...letters.map(({ id }) => ["id", id])] };
    return { which: which(filtered() ? "all dead letters" : plural(total, "dead letter")), query: [...(chosen.length ? chosen : [["all", "true"]]), ["failed_before", until]] };
  }

  async function purged(ids) {
    const { which, query } = await doomed(ids);
    if (!query.length) return null; // they went meanwhile
    if (!(await confirm({ title: "Purge for good?", text: `This deletes ${which} of ${name}. Nothing brings them back.`, action: "Purge" }))) return null;
    return change("DELETE", `${path}?${new URLSearchParams(query)}`);
  }

  async function apply(action, ids) {
    const wanted = ids.length ? { ids } : Object.fromEntries(Object.entries(filter()).filter(([, value]) => value));
    try {
      const answer = action === "replay" ? await change("POST", `${path}/replay`, wanted) : await purged(ids);
      if (!answer) return;
      toast(action === "replay" ? `${plural(answer.replayed, "message")} sent to ${name} again.` : `${plural(answer.purged, "dead letter")} purged.`);
      await load();
    } catch (problem) { toast(problem.message, "bad"); }
  }

  return {
    element,
    update(queue, overview) {
      total = queue.dead_letters ?? 0;
      lookedAt = overview.at;
      if (writable !== overview.writable) { writable = overview.writable; seen = null; }
      const busy = picked().length || list.querySelector("details[open]");
      if (seen === null || (seen !== total && !busy)) { seen = total; load(); }
    },
    dispose() { clearTimeout(timer); asked += 1; },
  };
}

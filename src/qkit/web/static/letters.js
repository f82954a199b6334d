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
  const list = h("div", { class: "items" });
  const bar = h("div", { class: "bar" }, h("span", { class: "choose" }, all, chosen), h("span", { class: "actions" }, replay, purge));
  const element = h(
    "section", { class: "panel", "aria-label": "Dead letters" },
    h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); load(); } },
      h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
      h("div", { class: "field grow" }, h("label", { for: "error" }, "Error"), error)),
    bar, list,
  );
  let seen = null, timer = null, letters = [], writable = false, asked = 0, total = 0;

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
      list.replaceChildren(...(letters.length ? letters.map((letter) => letterItem(letter, kept, open)) : [emptyList()]));
    } catch (problem) {
      if (turn !== asked) return;
      letters = [];
      list.replaceChildren(h("div", { class: "empty bad" }, h("h3", {}, "They cannot be read"), h("p", {}, problem.message)));
    }
    bar.hidden = letters.length === 0;
    tell();
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

  async function apply(action, ids) {
    const which = ids.length ? plural(ids.length, "dead letter") : filtered() ? "every dead letter that matches" : `all ${plural(total, "dead letter")}`;
    if (action === "purge" && !(await confirm({ title: "Purge for good?", text: `This deletes ${which} of ${name}. Nothing brings them back.`, action: "Purge" }))) return;
    const wanted = ids.length ? { ids } : Object.fromEntries(Object.entries(filter()).filter(([, value]) => value));
    try {
      let answer;
      if (action === "replay") answer = await change("POST", `${path}/replay`, wanted);
      else {
        const query = new URLSearchParams(ids.length ? ids.map((id) => ["id", id]) : Object.entries(wanted));
        answer = await change("DELETE", `${path}?${query}`);
      }
      if (!answer) return;
      toast(action === "replay" ? `${plural(answer.replayed, "message")} sent to ${name} again.` : `${plural(answer.purged, "dead letter")} purged.`);
      await load();
    } catch (problem) { toast(problem.message, "bad"); }
  }

  return {
    element,
    update(queue, overview) {
      total = queue.dead_letters ?? 0;
      if (writable !== overview.writable) { writable = overview.writable; seen = null; }
      const busy = picked().length || list.querySelector("details[open]");
      if (seen === null || (seen !== total && !busy)) { seen = total; load(); }
    },
    dispose() { clearTimeout(timer); asked += 1; },
  };
}

// List of a queue's dead letters: filter, read, replay and purge.

import { change, confirm, get, queuePath } from "./api.js";
import { ago, button, count, h, plural, timestamp, toast } from "./elements.js";
import { bodyElement, headerElement } from "./queue.js";

const REASONS = ["MaxRetriesExceeded", "ExplicitNack", "TTLExpired", "Undecodable", "Rejected"];
const LIMIT = 100;

export function deadLetterList(name) {
  const path = queuePath(name, "dead-letters");
  const reason = h("select", { id: "reason", onchange: () => load() }, h("option", { value: "" }, "any"), REASONS.map((word) => h("option", { value: word }, word)));
  const error = h("input", { id: "error", type: "search", placeholder: "type, or part of the text", oninput: loadSoon });
  const all = h("input", { type: "checkbox", id: "all", onchange: () => { for (const box of boxes()) box.checked = all.checked; updateActions(); } });
  const selectLabel = h("label", { for: "all", class: "select-label" }, "Select all");
  const replay = button("replay", "Replay all", () => run("replay"), { class: "primary" });
  const purge = button("trash", "Purge all…", () => run("purge"), { class: "danger quiet" });
  const list = h("div", { class: "items", tabindex: -1 });
  const bar = h("div", { class: "bar" }, h("span", { class: "choose" }, all, selectLabel), h("span", { class: "actions" }, replay, purge));
  const element = h(
    "section", { class: "panel", "aria-label": "Dead letters" },
    h("form", { class: "filter", onsubmit: (event) => { event.preventDefault(); load(); } },
      h("div", { class: "field" }, h("label", { for: "reason" }, "Reason"), reason),
      h("div", { class: "field grow" }, h("label", { for: "error" }, "Error"), error)),
    bar, list,
  );
  let oldestFirst = false, seen = null, timer = null, letters = [], writable = false, requests = 0, total = 0, sampledAt = 0;

  const boxes = () => [...list.querySelectorAll("input[type=checkbox]")];
  const selectedIds = () => boxes().filter((box) => box.checked).map((box) => box.value);
  const filter = () => ({ reason: reason.value, error: error.value.trim() });
  const filtered = () => Boolean(reason.value || error.value.trim());

  function loadSoon() { clearTimeout(timer); timer = setTimeout(load, 250); }

  function updateActions() {
    const ids = selectedIds();
    const what = ids.length ? `${count(ids.length)} selected` : filtered() ? "all that match" : "all";
    replay.lastChild.textContent = `Replay ${what}`;
    purge.lastChild.textContent = `Purge ${what}…`;
    replay.disabled = purge.disabled = !writable || letters.length === 0;
    selectLabel.textContent = letters.length === LIMIT && total > LIMIT && !filtered() ? `Select the ${oldestFirst ? "oldest" : "newest"} ${count(letters.length)} of ${count(total)}` : "Select all";
    all.disabled = letters.length === 0;
    all.checked = ids.length > 0 && ids.length === letters.length;
    all.indeterminate = ids.length > 0 && ids.length < letters.length;
  }

  async function load() {
    const request = ++requests;
    try {
      const result = await get(path, { limit: LIMIT, order: "newest", ...filter() });
      if (request !== requests) return; // a newer request is under way
      letters = result.dead_letters;
      oldestFirst = result.order === "oldest" && letters.length === LIMIT;
      // Read after the request, because the user may have changed it meanwhile.
      const kept = new Set(selectedIds());
      const open = new Set([...list.querySelectorAll("details[open]")].map((item) => item.dataset.id));
      const restoreFocus = focusRestorer();
      list.replaceChildren(...(letters.length ? letters.map((letter) => letterItem(letter, kept, open)) : [emptyList()]));
      restoreFocus();
    } catch (error) {
      if (request !== requests) return; // a newer request is under way
      letters = [];
      list.replaceChildren(h("div", { class: "empty bad" }, h("h3", {}, "Cannot read the dead letters"), h("p", {}, error.message)));
    }
    if (letters.length === 0 && bar.contains(document.activeElement)) list.focus();
    bar.hidden = letters.length === 0;
    updateActions();
  }

  /** Return a function that moves the keyboard focus back to the same dead letter, or to the next one. */
  function focusRestorer() {
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
      ? h("div", { class: "empty" }, h("h3", {}, "No match"), h("p", {}, "Try another reason or error."))
      : h("div", { class: "empty good" }, h("h3", {}, "No dead letters"), h("p", {}, "No message of this queue has failed for good."));
  }

  function letterItem(letter, kept, open) {
    return h(
      "div", { class: "item choice" },
      h("input", { type: "checkbox", value: letter.id, checked: kept.has(letter.id), "aria-label": `Select ${letter.id}`, onchange: updateActions }),
      h("details", { "data-id": letter.id, open: open.has(letter.id) },
        h("summary", {},
          h("span", { class: "tag" }, letter.reason),
          h("span", { class: "preview" }, [letter.error_type, letter.error].filter(Boolean).join(": ") || "no error recorded"),
          h("span", { class: "meta" }, `${plural(letter.attempts, "attempt")} · failed ${ago(letter.last_failed_at)}`)),
        bodyElement(letter.body),
        headerElement(letter.headers, {
          Id: letter.id, Group: letter.group, Key: letter.key, Sent: letter.sent_at && timestamp(letter.sent_at),
          "First failed": timestamp(letter.first_failed_at), "Last failed": timestamp(letter.last_failed_at), Trace: letter.trace_id,
        }),
        h("div", { class: "actions" },
          button("replay", "Replay this one", () => apply("replay", [letter.id]), { disabled: !writable }),
          button("trash", "Purge this one…", () => apply("purge", [letter.id]), { disabled: !writable, class: "danger quiet" }))),
    );
  }

  const run = (action) => apply(action, selectedIds());

  /** Return what a purge deletes, as text and as a query. Later dead letters are never included. */
  async function purgeTarget(ids) {
    if (ids.length) return { which: plural(ids.length, "dead letter"), query: ids.map((id) => ["id", id]) };
    const until = sampledAt;
    await load(); // so that the confirmation covers all current dead letters
    const filters = Object.entries(filter()).filter(([, value]) => value);
    const which = (number) => (filtered() ? `${number} that match` : `all ${number}`);
    if (letters.length < LIMIT) return { which: which(plural(letters.length, "dead letter")), query: [...filters, ...letters.map(({ id }) => ["id", id])] };
    return { which: which(filtered() ? "all dead letters" : plural(total, "dead letter")), query: [...(filters.length ? filters : [["all", "true"]]), ["failed_before", until]] };
  }

  async function purgeConfirmed(ids) {
    const { which, query } = await purgeTarget(ids);
    if (!query.length) return null; // the dead letters were deleted in the meantime
    if (!(await confirm({ title: "Purge dead letters?", text: `This deletes ${which} of ${name}. It cannot be undone.`, action: "Purge" }))) return null;
    return change("DELETE", `${path}?${new URLSearchParams(query)}`);
  }

  async function apply(action, ids) {
    const wanted = ids.length ? { ids } : Object.fromEntries(Object.entries(filter()).filter(([, value]) => value));
    try {
      const result = action === "replay" ? await change("POST", `${path}/replay`, wanted) : await purgeConfirmed(ids);
      if (!result) return;
      toast(action === "replay" ? `${plural(result.replayed, "dead letter")} replayed to ${name}.` : `${plural(result.purged, "dead letter")} purged.`);
      await load();
    } catch (error) { toast(error.message, "bad"); }
  }

  return {
    element,
    update(queue, overview) {
      total = queue.dead_letters ?? 0;
      sampledAt = overview.sampled_at;
      if (writable !== overview.writable) { writable = overview.writable; seen = null; }
      const busy = selectedIds().length || list.querySelector("details[open]");
      if (seen === null || (seen !== total && !busy)) { seen = total; load(); }
    },
    dispose() { clearTimeout(timer); requests += 1; },
  };
}

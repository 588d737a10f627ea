/** What happened, in sentences, the newest first. */

import { byId, make, prose } from "./dom.js";
import { clock, tally } from "./format.js";

const FEW = 30;
const NAMES = { lost: "lost", warning: "warning", checkpoint: "saved", morph: "morph", joined: "joined", left: "left", leaving: "leaving", failed: "failed", ended: "ended", begin: "start", asked: "asked", notice: "note" };
const state = { all: false, key: "" };

/** `showNear(step)` shows a step's picture. */
export function prepareStory(again, showNear) {
  byId("story-list").addEventListener("click", ({ target }) => {
    if (target.dataset.step) showNear(Number(target.dataset.step));
  });
  byId("story-more").addEventListener("click", () => {
    state.all = !state.all;
    again();
  });
}

export function drawStory(run) {
  const shown = state.all ? run.marks : run.marks.slice(-FEW), last = run.marks.at(-1);
  const key = `${run.marks.length} ${last?.time_s} ${last?.text} ${state.all}`, more = byId("story-more");
  if (key === state.key) return;
  state.key = key;
  more.hidden = run.marks.length <= FEW;
  more.textContent = state.all ? "show fewer" : `show ${run.older.rows.length ? "the newest" : "all"} ${run.marks.length}`;
  const list = byId("story-list");
  list.replaceChildren(...shown.toReversed().map((mark) => make("li", { class: mark.kind },
    make("time", { datetime: new Date(mark.time_s * 1000).toISOString() }, clock(mark.time_s)), " ",
    make("span", { class: "kind" }, NAMES[mark.kind] ?? mark.kind), " ", make("span", { class: "text" }, ...prose(words(mark))),
    mark.kind === "morph" && mark.step !== null ? make("button", { type: "button", class: "look", "data-step": String(mark.step), title: "what each rank did there" }, `step ${mark.step}`) : null)));
  if (shown.length === run.marks.length && run.older.rows.length) list.append(make("li", { class: "older" }, `Before these: ${tally(total(run.older.rows))}.`));
}

/** Whatever follows the first line of a failure, such as a traceback, is on top of the logs. */
const words = ({ kind, text }) => (kind === "failed" || kind === "lost" ? text.split("\n")[0] : text);

function total(rows) {
  const sums = {};
  for (const [, , , counts] of rows) for (const [kind, count] of Object.entries(counts)) sums[kind] = (sums[kind] ?? 0) + count;
  return sums;
}

/** Workers' logs: the first failure on top, then the output of one worker. */

import { byId, make } from "./dom.js";
import { read } from "./stream.js";

const TAIL_BYTES = 48 * 1024, MOST_CHARACTERS = 400_000, FOLLOW_MS = 1000;
// Colours and cursor movements of terminals.
const ESCAPES = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-_])/g;
const state = { worker: "", offset: null, key: "", failures: "", visible: false, isOver: false };

export function prepareLogs() {
  byId("logs-worker").addEventListener("change", (event) => show(event.target.value));
  new IntersectionObserver((entries) => {
    state.visible = entries.at(-1).isIntersecting;
    if (state.visible && state.worker && state.offset === null) more();
  }).observe(byId("logs"));
  setInterval(() => {
    if (state.visible && byId("logs-follow").checked && !state.isOver && state.worker && !document.hidden) more();
  }, FOLLOW_MS);
}

/** Choose a worker, and bring its log into view. */
export function showLog(worker) {
  const select = byId("logs-worker");
  if (![...select.options].some((option) => option.value === worker)) select.append(make("option", { value: worker }, worker));
  select.value = worker;
  show(worker);
  byId("logs").scrollIntoView({ block: "start" });
  byId("log").focus({ preventScroll: true });
}

function show(worker) {
  Object.assign(state, { worker, offset: null });
  byId("log").textContent = "";
  if (state.visible) more();
}

async function more() {
  const { worker } = state, log = byId("log");
  try {
    const answer = await read(`logs/${encodeURIComponent(worker)}?offset=${state.offset ?? -TAIL_BYTES}`);
    if (worker !== state.worker) return;
    if (!answer.ok) {
      log.textContent = answer.status === 404 ? `No output of worker ${worker} was kept.` : `The log cannot be read (${answer.status}).`;
      return;
    }
    const next = Number(answer.headers.get("x-varuna-next-offset")), text = (await answer.text()).replace(ESCAPES, "").replace(/\r(?!\n)/g, "\n");
    if (worker !== state.worker || next === state.offset) return;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
    log.textContent = ((state.offset ? log.textContent : "") + text).slice(-MOST_CHARACTERS) || "This worker has written nothing.";
    state.offset = next;
    if (atEnd || next === 0) log.scrollTop = log.scrollHeight;
  } catch { /* the stream says that the manager does not answer */ }
}

export function drawLogs(run) {
  state.isOver = run.ended !== null; // nothing follows, and soon nobody answers
  const failures = run.status.failures ?? [], members = run.status.members ?? [];
  const names = [...new Set([...members, ...run.workers.keys(), ...failures.map((failure) => failure.worker)])];
  const key = names.join(" "), select = byId("logs-worker");
  if (key !== state.key) {
    state.key = key;
    select.replaceChildren(...names.map((name) => make("option", { value: name }, members.includes(name) ? `${name} (rank ${members.indexOf(name)})` : name)));
    if (names.includes(state.worker)) select.value = state.worker;
    else if (names.length) {
      select.value = run.ended?.worker && names.includes(run.ended.worker) ? run.ended.worker : names[0];
      show(select.value);
    }
  }
  const told = JSON.stringify(failures);
  if (told === state.failures) return;
  state.failures = told;
  byId("failures").replaceChildren(...failures.slice(0, 5).map((failure, at) => make("div", { class: at ? "failure" : "failure first" },
    make("h3", {}, at ? `then worker ${failure.worker}` : `First loss or failure: worker ${failure.worker}`),
    make("pre", { tabindex: "0", role: "region", "aria-label": `Cause, worker ${failure.worker}` }, failure.cause),
    make("button", { type: "button", on: { click: () => showLog(failure.worker) } }, `Log of ${failure.worker}`))));
}

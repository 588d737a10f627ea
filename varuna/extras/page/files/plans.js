/** Where a step's time goes, predicted and measured, and what other plans for the same workers would bring. */

import { byId, legend, make, say } from "./dom.js";
import { bytes, classesOf, counted, number, percent, spaced, span } from "./format.js";
import { newest, splitWaits } from "./model.js";
import { read } from "./stream.js";

const PREDICTED = [["compute", "compute_s"], ["transfer", "transfer_s"], ["all-reduce", "reduce_s"], ["optimizer", "optimizer_s"], ["idle", "idle_s"]];
const MEASURED = [["compute", "compute_s"], ["transfer", "transfer_s"], ["all-reduce", "reduced_s"], ["optimizer", "ending_s"], ["idle", "idle_s"], ["waiting", "waited_s"]];
const MOST_STAGES = 16;
let table = null, asked = "", busy = false;

export function preparePlans() {
  legend(byId("split-legend"), [["part-compute", "compute"], ["part-transfer", "transfer"], ["part-all-reduce", "all-reduce"],
    ["part-optimizer", "optimizer, vote and the rest"], ["part-idle", "idle"], ["part-waiting", "waiting: transfer or idle"]]);
}

/** Ask the planner when a generation has begun to train, or when measured times are new. */
export async function refreshPlans(run, again) {
  const wanted = `${run.status.generation} ${run.timed?.predicted_s} ${run.workers.size}`;
  if (busy || wanted === asked || run.status.read_only || run.ended || !run.recent.length || !run.workers.size) return;
  busy = true;
  try {
    const answer = await read("plans");
    if (answer.ok) {
      const found = await answer.json();
      if (found.plans || !table?.plans) table = found; // at the end of a run there is nobody to plan for
      asked = wanted;
    }
  } catch { /* the stream says that the manager does not answer */ } finally {
    busy = false;
  }
  again();
}

export function drawSplit(run) {
  const rows = [], timed = run.timed?.generation === run.status.generation ? run.timed : null;
  const running = table?.running ?? (timed?.predicted ? { ...timed.predicted, step_s: timed.predicted_s } : null);
  if (running) rows.push(["predicted", PREDICTED, running, running.step_s]);
  if (timed?.stages.length) {
    const split = splitWaits(timed, run.waits), whole = mean(split);
    rows.push(["measured", MEASURED, whole, whole.step_s]);
    const stages = split.length > 1 ? split.slice(0, MOST_STAGES) : [];
    rows.push(...stages.map((stage, at) => [`stage ${at}`, MEASURED, stage, stage.step_s]));
  }
  const box = byId("split-bars"), key = JSON.stringify(rows);
  byId("split-legend").hidden = !rows.length;
  say(byId("split-note"), note(run, running, timed));
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  const longest = Math.max(...rows.map(([, , , whole]) => whole));
  box.replaceChildren(...rows.map(([name, parts, values, whole]) => bar(name, parts, values, whole, longest)));
}

function note(run, running, timed) {
  const said = [], isOver = Boolean(run.status.read_only || run.ended);
  if (!running && !timed && isOver) return "The last generation was over before times were measured.";
  if (!running) said.push(isOver ? "No prediction from measured times was kept for the last generation." : "The prediction comes with the first step.");
  else if (table && !table.measured) said.push("The prediction is from operation counts and nominal hardware: it ranks plans, but its seconds may be far off.");
  if (!timed) said.push(isOver ? "No measured times were kept for the last generation." : "Measured parts are known after some seconds of training in a generation; until then only whole steps are.");
  else if ((timed.stages.length ?? 0) > MOST_STAGES) said.push(`The first ${MOST_STAGES} of ${timed.stages.length} stages are shown.`);
  if (timed && !isOver && run.waits?.generation !== timed.generation) said.push("What waits were for is known after a step was looked at, if the clocks of all machines can be compared.");
  else if (timed && run.waits?.generation === timed.generation) said.push(looked(run.waits));
  const step = newest(run);
  if (!timed && !isOver && run.status.step_s && step) said.push(`The newest step took ${span(run.status.step_s)}.`);
  return said.join(" ");
}

function looked({ step, looks, uncertain_s }) {
  const off = uncertain_s ? ` Clocks of machines agree to within ${span(uncertain_s)}, and so do the begins of transfers.` : "";
  return `A wait is transfer while its message is on its way, and idle before; told apart in ${looks === 1 ? `step ${step}` : `${looks} steps, the newest is ${step}`}.${off}`;
}

function mean(stages) {
  const sums = {};
  for (const stage of stages) for (const [name, value] of Object.entries(stage)) sums[name] = (sums[name] ?? 0) + value / stages.length;
  return sums;
}

function bar(name, parts, values, whole, longest) {
  const found = parts.filter(([, key]) => values[key] > whole * 0.002);
  const words = found.map(([part, key]) => `${part} ${span(values[key])} (${percent(values[key] / whole)})`).join(", ");
  const strip = make("div", { class: "strip", role: "img", "aria-label": `${name}, ${span(whole)}: ${words}` });
  strip.style.width = percent(whole / longest, 2).replace(" ", "");
  for (const [part, key] of found) {
    const piece = make("span", { class: `part-${part}`, title: `${part} ${span(values[key])}` });
    piece.style.flexGrow = (100 * values[key]) / whole; // less than 1 in all would leave room
    strip.append(piece);
  }
  const main = name === "predicted" || name === "measured";
  return make("div", { class: main ? "split" : "split minor" }, make("span", { class: "name" }, name), make("div", { class: "track" }, strip),
    make("span", { class: "sum" }, span(whole)), main ? make("p", { class: "soft words" }, words) : null);
}

const keyOf = (plan) => `${plan.shape} ${plan.micro_batch} ${classesOf(plan)}`;

export function drawPlans(run) {
  const box = byId("plans-table"), section = byId("plans");
  section.hidden = Boolean(run.status.read_only || run.ended);
  const runs = run.status.plan ? keyOf(run.status.plan) : "";
  byId("plans-scroll").hidden = !table?.plans?.length;
  say(byId("plans-note"), plansNote());
  const key = JSON.stringify([table?.plans, runs]);
  if (box.dataset.key === key || !table?.plans) return;
  box.dataset.key = key;
  const priced = table.plans.some((plan) => plan.dollars_per_hour !== null);
  const heads = ["P x D", "m", "step", "examples/s", "compute", "transfer", "all-reduce", "idle", "memory", "workers", ...(priced ? ["$ per hour"] : []), "what it would bring"];
  const base = table.plans.find((plan) => keyOf(plan) === runs) ?? table.running;
  const base_s = base?.step_time_s ?? base?.step_s;
  box.replaceChildren(
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...table.plans.map((plan) => {
      const isRunning = keyOf(plan) === runs, parts = plan.breakdown, whole = plan.step_time_s;
      const cells = [String(plan.micro_batch), span(whole), number(plan.examples_per_s, 3), percent(parts.compute_s / whole), percent(parts.transfer_s / whole),
        percent(parts.reduce_s / whole), percent(parts.idle_s / whole), bytes(Math.max(...plan.memory_bytes)), String(plan.gpus_used),
        ...(priced ? [plan.dollars_per_hour?.toFixed(2) ?? ""] : []), brings(plan, isRunning, base_s)];
      return make("tr", { class: isRunning ? "running" : "" }, make("th", { scope: "row" }, spaced(plan.shape), classesOf(plan) ? make("small", {}, ` ${classesOf(plan)}`) : ""), ...cells.map((cell) => make("td", {}, cell)));
    })),
  );
}

function brings(plan, isRunning, base_s) {
  if (isRunning) return "runs now";
  const change = base_s / plan.step_time_s - 1, why = plan.why ? ` (${plan.why})` : "";
  if (!Number.isFinite(change) || Math.abs(change) < 0.005) return `as fast as what runs${why}`;
  return change > 0 ? `${percent(change)} faster than what runs` : `${percent(-change)} slower than what runs${why}`;
}

function plansNote() {
  if (!table) return "The planner is asked after the first step.";
  if (!table.plans) return `There is no table: ${table.why ?? "the manager has none"}.`;
  const said = [`For ${counted(table.workers, "worker")}; ${table.measured ? "from measured times" : "from operation counts and nominal hardware, until times are measured"}.`];
  for (const why of table.idle ?? []) said.push(`${why}.`);
  const nearest = table.outpaced?.[0], misfit = table.rejected?.at(-1);
  if (nearest) said.push(`Slower: ${nearest.stages} x ${nearest.replicas} takes at least ${span(nearest.at_least_s)}.`);
  if (misfit && !misfit.device_class) said.push(`Does not fit: ${misfit.reason}.`);
  return said.join(" ");
}

/** The figures at the top, checkpoints, and what a run has cost so far and may still cost. */

import { byId, make, say, term } from "./dom.js";
import { clock, counted, number, percent, spaced, span } from "./format.js";
import { newest } from "./model.js";

export function drawNumbers(run) {
  const { status } = run, step = newest(run), total = status.steps && status.steps < 1e8 ? status.steps : 0, left = status.read_only ? null : status.left_s ?? null;
  const done = step ? step[0] + 1 : 0, plan = status.plan, row = run.bands.at(-1);
  const shown = [
    ["step", step ? done.toLocaleString("en") : "–", [total ? `of ${total.toLocaleString("en")} (${percent(done / total)})` : "", status.training > 1 ? `training ${status.training} of the script` : ""].filter(Boolean).join("; ")],
    ["loss", step ? number(step[2], 5) : "–", ""],
    ["examples/s", step ? number(step[3], 3) : "–", status.step_s ? `a step takes ${span(status.step_s)}` : ""],
    ["plan", plan ? spaced(plan.shape, false) : "–", plan ? `stages x replicas; micro-batches of ${plan.micro_batch}` : ""],
    ["workers", String(run.workers.size), status.lost_workers ? `${status.lost_workers} lost so far` : "none lost"],
    ["last morph", row?.generation > 0 && row.recovery_s !== null ? span(row.recovery_s) : "–", row?.generation > 0 ? `${counted(row.redone, "step")} redone; generation ${row.generation}` : ""],
    ["time left", left === null ? "–" : span(left), ""],
  ];
  if (status.read_only) shown.splice(4, 1, ["workers lost", String(status.lost_workers ?? 0), ""]);
  fill(byId("numbers"), shown);
}

/** Build a list of terms once, and change its texts from then on. */
function fill(list, shown) {
  if (list.children.length !== shown.length) list.replaceChildren(...shown.map(([name]) => term(name, " ", " ")));
  shown.forEach(([name, value, note], at) => {
    say(list.children[at].querySelector("dt"), name);
    say(list.children[at].querySelector("b"), value);
    say(list.children[at].querySelector("small"), note);
  });
}

export function drawCheckpoints(run) {
  const { status, checkpoint } = run, { saving } = status, folder = status.rescues ? null : status.checkpoint_dir, box = byId("checkpoints-body");
  const durable = Math.max(status.durable_step ?? 0, checkpoint?.step ?? 0);
  const key = JSON.stringify([folder, durable, saving, checkpoint, status.steps]);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  if (!folder && !status.steps) {
    box.replaceChildren(make("p", { class: "soft" }, "Not known before the first worker has joined."));
    return;
  }
  if (!folder) {
    box.replaceChildren(make("p", { class: "soft" }, "The script keeps no checkpoints. With checkpoints= in its Trainer, a run survives the loss of all of its workers."));
    return;
  }
  const states = [uploaded(saving, durable), committed(checkpoint)];
  box.replaceChildren(
    make("ol", { class: "chain" }, ...states.map(([name, kind, value, note]) =>
      make("li", { class: kind }, make("span", {}, name), make("b", {}, value), make("small", {}, note)))),
    make("p", { class: "soft" }, make("code", {}, folder)),
    make("p", { class: "soft" }, "To read every byte again and compare: ", make("code", {}, `varuna checkpoints verify ${folder}`)),
  );
}

function uploaded(saving, durable) {
  if (saving) return ["uploaded", "good", `step ${saving.step}`, saving.of === null ? `${counted(saving.parts, "part")} so far` : `${saving.parts} of ${counted(saving.of, "part")}`];
  if (!durable) return ["uploaded", "", "none yet", ""];
  return ["uploaded", "good", `step ${durable}`, "all parts"];
}

function committed(checkpoint) {
  if (!checkpoint) return ["committed", "", "none yet", ""];
  if (checkpoint.resumed) return ["committed", "good", `step ${checkpoint.step}`, "the run goes on from it"];
  return ["committed", "good", `step ${checkpoint.step}`, `complete since ${clock(checkpoint.time_s)}`];
}

/** Cents, and below a tenth of a dollar more. */
const money = (cost, value) => `${cost.currency}${value.toFixed(value > 0 && value < 0.1 ? 4 : 2)}`;

/** What the run has cost, where somebody has said what a worker costs, and what is left of its budget. */
export function drawCost(run) {
  const { cost, budget } = run.status, section = byId("cost"), isOver = run.status.read_only || run.ended, shown = [];
  section.hidden = !cost && !budget;
  if (cost) {
    shown.push([isOver ? "spent" : "spent so far", money(cost, cost.spent), `${number(cost.worker_hours, 3)} worker hours`]);
    if (!isOver) shown.push(["now", `${money(cost, cost.per_hour)} per hour`, ""]);
  }
  if (cost && cost.on_demand !== null) {
    const saved = cost.saved === null ? "" : `${percent(Math.abs(cost.saved))} ${cost.saved >= 0 ? "saved" : "more was spent"}`;
    shown.push(["the same work on demand", money(cost, cost.on_demand), saved]);
  }
  if (budget) {
    const ends = budget.ends_in_s === null || isOver ? "" : `it ends in ${span(budget.ends_in_s)} at this rate`;
    if (cost && budget.max_dollars !== null) shown.push(["left of the budget", money(cost, Math.max(0, budget.left_dollars)), ends]);
    if (budget.max_hours !== null) shown.push(["left of its hours", span(Math.max(0, budget.left_hours) * 3600), `of ${number(budget.max_hours, 3)} hours`]);
  }
  fill(byId("cost-body"), shown);
}

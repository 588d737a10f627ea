/** The workers of a run: stages across and replicas down (or the other way round if they are many). */

import { byId, legend, make, say } from "./dom.js";
import { classesOf, counted, span } from "./format.js";

const MANY = 60, CROWDED = 24, FEW = 12;
const state = { built: "", chosen: null, cells: new Map(), focused: 0 };
let act = null;

/** `drain(node)` and `showLog(worker)` are what the card of a worker offers. */
export function prepareGrid(actions) {
  act = actions;
  legend(byId("grid-legend"), [["cell-ok", "works"], ["cell-slow", "slower than its peers"], ["cell-silent", "silent"],
    ["cell-leaving", "will leave"], ["cell-lost", "lost, or not there yet"]]);
  byId("grid").addEventListener("keydown", move);
}

/** In words: "2 stages x 3 replicas", or "3 pipelines of 4, 4 and 3 stages, on 8 A100 + 3 T4". */
function shapeOf(plan) {
  const classes = classesOf(plan), on = classes ? `, on ${classes}` : "";
  if (new Set(plan.depths).size < 2) return `${counted(plan.stages, "stage")} x ${counted(plan.replicas, "replica")}${on}`;
  const sizes = plan.depths.map(String), last = sizes.pop();
  return `${plan.replicas} pipelines of ${sizes.join(", ")} and ${last} stages${on}`;
}

/** How a worker is, by its manager: a class, and words. */
const condition = (worker) => (worker ? [`cell-${worker.condition}`, worker.words] : ["cell-lost", "not there"]);

export function drawGrid(run) {
  const { plan, members = [] } = run.status;
  const count = plan ? plan.depths.reduce((sum, depth) => sum + depth, 0) : 0, many = count > MANY;
  const over = [...run.workers.values()].filter((worker) => !members.slice(0, count).includes(worker.name));
  const isOver = Boolean(run.status.read_only || run.ended), shape = plan && shapeOf(plan);
  say(byId("fleet-note"), !plan ? "no plan yet" : isOver ? `${shape} at the end` : `${shape}${hosts(run)}`);
  const others = over.map((worker) => `${worker.name} (${worker.state === "joined" ? `spare: ${worker.words}` : worker.state})`);
  say(byId("spares"), others.length && !isOver ? `${plan ? "Also here: " : ""}${others.length > FEW ? summed(over) : others.join(", ")}` : "");
  const key = plan ? `${plan.shape} ${members.slice(0, count).join(" ")} ${many}` : "";
  if (key !== state.built) build(plan, members, many);
  state.built = key;
  byId("grid-legend").hidden = isOver || !plan;
  for (const [name, { cell, note, speed }] of state.cells) {
    const worker = run.workers.get(name), [kind, words] = isOver ? ["cell-wait", "sat here last"] : condition(worker);
    const chosen = state.chosen === name ? " chosen" : "";
    if (cell.className !== `cell ${kind}${chosen}`) cell.className = `cell ${kind}${chosen}`;
    const label = `${cell.dataset.seat}: ${name}, ${words}`; // where there is no text
    if (note.parentElement === null && cell.getAttribute("aria-label") !== label) cell.setAttribute("aria-label", label);
    say(note, worker && worker.node !== name ? worker.node : "");
    say(speed, isOver || !worker ? words : kind === "cell-ok" ? (worker.compute_s ? `${span(worker.compute_s)} each` : "works") : words.replace(" the compute of its peers", ""));
  }
  card(run);
}

/** How many workers without a seat there are, by state. */
function summed(workers) {
  const counts = {};
  for (const { state: word } of workers) counts[word === "joined" ? "spare" : word] = (counts[word === "joined" ? "spare" : word] ?? 0) + 1;
  return Object.entries(counts).map(([word, count]) => `${count} ${word}`).join(", ");
}

/** On how many machines; `varuna run` has one, on which each worker stands for a machine of its own. */
function hosts(run) {
  const nodes = new Set([...run.workers.values()].filter((worker) => worker.node !== worker.name).map((worker) => worker.node));
  return nodes.size ? ` on ${nodes.size} ${nodes.size === 1 ? "machine" : "machines"}` : "";
}

function build(plan, members, many) {
  const grid = byId("grid"), held = [...state.cells].find(([, { cell }]) => cell === document.activeElement)?.[0];
  state.cells.clear();
  grid.replaceChildren();
  if (!plan) return;
  grid.className = many ? "many" : "";
  const across = plan.replicas > 12 ? "replica" : "stage";
  const deepest = Math.max(...plan.depths), firsts = plan.depths.map((_, at) => plan.depths.slice(0, at).reduce((sum, depth) => sum + depth, 0));
  const [columns, rows] = across === "stage" ? [deepest, plan.replicas] : [plan.replicas, deepest];
  grid.style.gridTemplateColumns = `max-content repeat(${columns}, minmax(${columns > CROWDED ? ".6rem" : many ? "1.35rem" : "6.6rem"}, 1fr))`;
  const down = across === "stage" ? "replica" : "stage", heads = [make("span", { class: "head" })];
  for (let at = 0; at < columns; at++) heads.push(make("span", { class: "head" }, columns > CROWDED && at % 5 ? "" : many ? String(at) : `${across} ${at}`));
  grid.append(...heads);
  for (let row = 0; row < rows; row++) {
    grid.append(make("span", { class: "head" }, `${down} ${row}`));
    for (let column = 0; column < columns; column++) {
      const [stage, replica] = across === "stage" ? [column, row] : [row, column];
      if (stage >= plan.depths[replica]) grid.append(make("span"));
      else grid.append(cellOf(members[firsts[replica] + stage] ?? "?", stage, replica, many, columns, row * columns + column));
    }
  }
  const first = state.cells.get(held)?.cell ?? grid.querySelector("button");
  if (!first) return;
  first.tabIndex = 0;
  if (held) first.focus(); // a morph must not take the seat away from under somebody's keys
}

function cellOf(name, stage, replica, many, columns, at) {
  const note = make("small"), speed = make("small");
  const cell = make("button", {
    type: "button", class: "cell", tabindex: "-1", "data-seat": `stage ${stage}, replica ${replica}`, "data-columns": columns, "data-at": at,
    on: { click: () => { state.chosen = state.chosen === name ? null : name; act.again(); } },
  }, ...(many ? [] : [make("span", { class: "hide" }, `stage ${stage}, replica ${replica}: `), make("b", {}, name), note, speed]));
  state.cells.set(name, { cell, note, speed });
  return cell;
}

/** Arrow keys go from seat to seat. */
function move(event) {
  const cells = [...byId("grid").querySelectorAll("button")], at = cells.indexOf(document.activeElement);
  if (at < 0) return;
  const columns = Number(cells[at].dataset.columns);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  const next = step && cells.find((cell) => Number(cell.dataset.at) === Number(cells[at].dataset.at) + step);
  if (!next) return;
  event.preventDefault();
  cells[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function card(run) {
  const box = byId("worker"), name = state.chosen, seat = state.cells.get(name);
  box.hidden = !seat;
  if (!seat) return;
  const worker = run.workers.get(name), isOver = run.status.read_only || run.ended;
  const words = isOver ? "the run is over" : condition(worker)[1];
  const facts = [["state", words]];
  if (worker) {
    facts.push(["rank", `${worker.rank} (${seat.cell.dataset.seat})`], ["machine", worker.node], ["device", [worker.device_class, worker.device].filter(Boolean).join(", ") || "none of its own: it computes on the CPU"]);
    facts.push(["process", String(worker.pid ?? "not known")], ["does", worker.activity || "nothing yet"]);
    facts.push(["heard", worker.silent_s === null ? "not yet" : `${span(worker.silent_s)} ago; lost after ${span(run.status.lease_s)}`]);
    if (worker.compute_s) facts.push(["a micro-batch", `${span(worker.compute_s)} of compute`]);
  }
  const text = facts.flat().join("|");
  if (box.dataset.text === `${name}|${text}`) return;
  const held = box.contains(document.activeElement) ? document.activeElement.textContent : null;
  box.dataset.text = `${name}|${text}`;
  const list = make("dl", {}, ...facts.map(([term, what]) => make("div", {}, make("dt", {}, term), make("dd", {}, what))));
  const buttons = [make("button", { type: "button", on: { click: () => act.showLog(name) } }, "Show its log")];
  if (worker && act.canAct()) buttons.push(make("button", { type: "button", on: { click: () => act.drain(worker.node) } }, "Drain its machine"));
  buttons.push(make("button", { type: "button", on: { click: () => { state.chosen = null; seat.cell.focus(); act.again(); } } }, "Close"));
  box.replaceChildren(make("h3", {}, `Worker ${name}`), list, make("div", { class: "buttons" }, ...buttons));
  if (held) buttons.find((button) => button.textContent === held)?.focus();
}

/** What a page can ask the run to do: each time with the operator's token and a confirmation. */

import { byId, make, say } from "./dom.js";
import { change } from "./stream.js";

const ACTIONS = {
  checkpoint: {
    title: "Save a checkpoint", path: "checkpoint", text: "All workers save their parts after the current step. Training goes on meanwhile.",
    said: "A checkpoint will be written after the current step.",
  },
  morph: {
    title: "Plan anew", path: "morph", text: "The run changes to the best plan for its current workers, if that is another one than it runs now.",
    said: "The planner was asked; what it finds is told under “What happened”.",
  },
  drain: {
    title: "Drain a machine", path: "drain", text: "The state of its workers moves to others after the current step, then it is released.",
    said: "The machine will be released once its state is elsewhere.",
  },
  stop: {
    title: "Stop the run", path: "stop", text: "The run ends after the current step, with a checkpoint if it keeps any. Its machines are released.",
    said: "The run will stop after the current step.", isFinal: true,
  },
};
const state = { token: "", chosen: null, run: null };

export function prepareActions() {
  byId("actions-buttons").append(...Object.entries(ACTIONS).map(([name, { title, isFinal }]) =>
    make("button", { type: "button", id: `act-${name}`, class: isFinal ? "danger" : "", on: { click: () => ask(name) } }, title)));
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());
  byId("confirm-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
}

/** Whether the manager that the page talks to can change anything. */
export const canAct = (run) => run.known && !run.status.read_only && !run.ended;

export function drawActions(run) {
  state.run = run;
  byId("actions").hidden = !canAct(run);
  byId("act-checkpoint").hidden = !run.status.checkpoint_dir || Boolean(run.status.rescues);
  byId("act-drain").hidden = !(run.status.nodes ?? []).length;
}

/** Open the confirmation; for a drain with this machine. */
export function ask(name, node = "") {
  const { title, text, isFinal } = ACTIONS[name], nodes = name === "drain" ? state.run.status.nodes : [];
  state.chosen = name;
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-error"), "");
  byId("confirm-node").hidden = !nodes.length;
  byId("confirm-nodes").replaceChildren(...nodes.map((each) => make("option", { value: each, selected: each === node }, each)));
  byId("confirm-token").value = state.token;
  say(byId("confirm-yes"), title);
  byId("confirm-yes").className = isFinal ? "danger" : "main";
  byId("confirm").showModal();
}

async function send() {
  const { path, said } = ACTIONS[state.chosen], token = byId("confirm-token").value.trim();
  const body = state.chosen === "drain" ? { node: byId("confirm-nodes").value } : {};
  try {
    const answer = await change(path, token, body);
    if (answer.ok) {
      state.token = token; // until the page is closed
      byId("confirm").close();
      say(byId("actions-said"), said);
      return;
    }
    const { error } = await answer.json().catch(() => ({}));
    say(byId("confirm-error"), answer.status === 401 ? "The manager does not accept this token." : `The manager refused: ${error ?? answer.status}`);
  } catch (error) {
    say(byId("confirm-error"), `The manager does not answer: ${error.message}`);
  }
}

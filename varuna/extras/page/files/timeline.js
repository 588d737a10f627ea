/** The picture of one step: what each rank did, and when; measured, and simulated below. The manager draws it. */

import { byId, make, say } from "./dom.js";
import { newest } from "./model.js";
import { read } from "./stream.js";

const ASK_S = 1, MOST_TRIES = 60;
let asked = 0, address = "", kept = "";

export function prepareTimeline() {
  byId("timeline-form").addEventListener("submit", (event) => {
    event.preventDefault();
    show(byId("timeline-step").value);
  });
  byId("timeline-recorded").addEventListener("click", ({ target }) => {
    if (target.dataset.step) show(target.dataset.step);
  });
}

/** Of steps long ago only a few are recorded: the nearest one. */
export async function showNear(step) {
  const steps = await recorded();
  const nearest = steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0] ?? step);
  byId("timeline").scrollIntoView({ block: "nearest" });
  byId("timeline-step").focus({ preventScroll: true });
  await show(String(nearest));
}

export function drawTimeline(run) {
  const key = `${run.status.generation} ${run.waits?.generation} ${run.ended !== null}`;
  byId("timeline-newest").hidden = Boolean(run.status.read_only || run.ended || !newest(run));
  if (key === kept || !newest(run)) return;
  kept = key;
  recorded();
}

async function recorded() {
  try {
    const answer = await read("timelines"), { steps } = await answer.json();
    byId("timeline-recorded").replaceChildren(...steps.slice(-12).map((step) =>
      make("button", { type: "button", "data-step": String(step), "aria-label": `step ${step}` }, step.toLocaleString("en"))));
    byId("timeline-kept").hidden = !steps.length;
    return steps;
  } catch { return []; } // the stream says that the manager does not answer
}

/** Ask until the step is over; a later question takes the place of this one. */
async function show(step) {
  const mine = ++asked, name = step === "" ? "the newest step" : `step ${step}`;
  byId("timeline-step").value = step;
  say(byId("timeline-said"), `Asking the workers for ${name}.`);
  try {
    for (let at = step, tries = 0; tries < MOST_TRIES; tries++) {
      const answer = await read(`timeline.svg${at === "" ? "" : `?step=${encodeURIComponent(at)}`}`);
      if (mine !== asked) return;
      if (answer.status === 200) return drawn(await answer.blob(), name);
      const told = await answer.json();
      if (answer.status !== 202) return say(byId("timeline-said"), `${told.error}.`);
      at = String(told.step);
      say(byId("timeline-said"), told.step > told.newest ? `Waiting for step ${told.step}; the newest is ${told.newest}.` : `Asking the workers for step ${told.step}.`);
      await new Promise((resolve) => setTimeout(resolve, ASK_S * 1000));
      if (mine !== asked) return;
    }
    say(byId("timeline-said"), `Nobody has told of ${name} within a minute. Ask again.`);
  } catch {
    if (mine === asked) say(byId("timeline-said"), "The manager does not answer.");
  }
}

function drawn(picture, name) {
  if (address) URL.revokeObjectURL(address);
  address = URL.createObjectURL(picture);
  const image = byId("timeline-image");
  image.src = address;
  image.alt = `What each rank did in ${name}, measured and simulated`;
  byId("timeline-sheet").hidden = false;
  say(byId("timeline-said"), `This is ${name}: each box is an action of a stage, with the number of its micro-batch.`);
}

/** The page: what comes from the manager goes into the model, and from there to the parts, at most a few times a second. */

import { ask, canAct, drawActions, prepareActions } from "./actions.js";
import { drawChart, prepareChart } from "./chart.js";
import { byId, say, tell } from "./dom.js";
import { clock, span } from "./format.js";
import { drawGrid, prepareGrid } from "./grid.js";
import { drawLogs, prepareLogs, showLog } from "./logs.js";
import { apply, nothing, phase } from "./model.js";
import { drawCheckpoints, drawCost, drawNumbers } from "./numbers.js";
import { drawPlans, drawSplit, preparePlans, refreshPlans } from "./plans.js";
import { drawStory, prepareStory } from "./story.js";
import { enter, listen } from "./stream.js";
import { drawTimeline, prepareTimeline, showNear } from "./timeline.js";

const THEMES = ["auto", "light", "dark"];
const run = nothing();
const connection = { state: "connecting", text: "", since_s: Date.now() / 1000 };
const waiting = new Set();
let isDue = false;

/** Draw soon. Hidden tabs draw nothing; they catch up when they are seen. */
function again(what = "all") {
  waiting.add(what);
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    drawAll();
    waiting.clear();
  });
}

function drawAll() {
  drawState();
  if (!run.known) return;
  drawNumbers(run);
  drawGrid(run);
  drawStory(run);
  drawSplit(run);
  drawTimeline(run);
  drawPlans(run);
  drawCheckpoints(run);
  drawCost(run);
  drawActions(run);
  drawLogs(run);
  if (waiting.has("all") || waiting.has("steps") || waiting.has("band") || waiting.has("mark") || waiting.has("whole")) drawChart(run);
  refreshPlans(run, () => again("plans"));
}

/** The one line at the top, and the box below it where there is something to say. */
function drawState() {
  const word = phase(run), { state } = connection, isOpen = state === "live" || state === "over";
  const view = state === "closed" ? "closed" : !run.known ? (state === "lost" ? "lost" : "loading") : !isOpen && state !== "connecting" ? "lost" : word;
  if (document.body.dataset.view !== view) document.body.dataset.view = view;
  document.body.classList.toggle("known", run.known && state !== "closed");
  say(byId("state-text"), { loading: "connecting", lost: "disconnected", closed: "signed out" }[view] ?? stateText(word));
  const [title, text] = banner(view);
  byId("banner").hidden = !title;
  say(byId("banner-title"), title);
  tell(byId("banner-text"), text);
  document.title = `${run.recent.length ? `step ${run.recent.at(-1)[0] + 1} · ` : ""}${view} · Varuna`;
}

const stateText = (word) => (run.ended ? (run.ended.exit_code ? `ended with exit code ${run.ended.exit_code}` : isShort() ? "ended early" : "ended well") : word === "without" ? "without a manager" : (run.status.state ?? word).split(":")[0]);

function banner(view) {
  const rest = (run.status.state ?? "").split(": ").slice(1).join(": ");
  if (run.status.waits_for && ["starting", "forming", "training", "morphing"].includes(view)) return [`No step for ${span(run.status.still_s)}`, sentence(run.status.waits_for)];
  switch (view) {
    case "loading": return ["Loading", "Asking the manager for the run."];
    case "closed": return ["This page may not read the run", "Its link was used already, or has expired. In a terminal on the manager's machine, `varuna open` gives a new one."];
    case "lost": return ["Disconnected", `${connection.text}. Trying again; ${run.known ? `what is shown is from ${clock(connection.since_s)}` : "nothing has been read yet"}. Training does not need this page.`];
    case "ended": return isShort() ? ["The run has ended before its last step", `${run.ended.text} of ${run.status.steps.toLocaleString("en")}`] : ["The run has ended well", run.ended.text];
    case "failed": return [`The run ended with exit code ${run.ended.exit_code}`, run.ended.text];
    case "without": return ["This run has no manager", "It has not ended: start the same command again to continue it. What is shown is what its folder keeps."];
    case "starting": return run.recent.length ? ["", ""] : ["The run is starting", sentence(run.status.doing || rest)];
    default: return rest ? ["Waiting", sentence(rest)] : ["", ""];
  }
}

/** It was stopped, or its script had enough; of a run without a last step nobody can say so. */
const isShort = () => run.status.steps > 0 && run.status.steps < 1e8 && run.recent.length > 0 && run.recent.at(-1)[0] + 1 < run.status.steps;

const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}.`.replace(/\.\.$/, ".");

function prepareTheme() {
  const button = byId("theme"), set = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.dataset.next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    say(button, `theme: ${theme}`);
    sessionStorage.setItem("varuna-theme", theme);
  };
  set(sessionStorage.getItem("varuna-theme") ?? "auto");
  button.addEventListener("click", () => set(button.dataset.next));
}

prepareTheme();
prepareChart(() => again(), showNear);
prepareGrid({ again: () => again("grid"), showLog, drain: (node) => ask("drain", node), canAct: () => canAct(run) });
preparePlans();
prepareTimeline();
prepareStory(() => again("story"), showNear);
prepareLogs();
prepareActions();
addEventListener("hashchange", () => location.reload());
await enter().catch(() => {});
listen(
  (kind, value) => again(apply(run, kind, value)),
  (state, text) => {
    if (state === "live") connection.since_s = Date.now() / 1000;
    if (state !== connection.state || text !== connection.text) again("state");
    Object.assign(connection, { state, text });
  },
  () => run.ended !== null,
);

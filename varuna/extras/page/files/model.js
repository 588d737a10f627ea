/** What the page knows of its run: the manager's events, applied one after the other. Pure. */

const MOST_RECENT = 6000;
const MOST_MARKS = 600, MOST_OLDER = 1200;

export function nothing() {
  return {
    known: false, buckets: [], recent: [], bands: [], marks: [], older: { width_s: 1, rows: [] }, timed: null, waits: null, checkpoint: null, ended: null,
    status: {}, workers: new Map(),
  };
}

/** Take one event of the manager's stream; returns the kind of what changed. */
export function apply(run, kind, value) {
  switch (kind) {
    case "whole": {
      const { steps, ...rest } = value;
      Object.assign(run, rest, { known: true, recent: steps.recent, buckets: rows(steps) });
      break;
    }
    case "steps": value.forEach((row) => step(run, row)); break;
    case "band": band(run, value); break;
    case "mark": mark(run, value); break;
    case "status": status(run, value); break;
    default: run[kind] = value;
  }
  return kind;
}

/** Buckets as points: first step, last step, times, and [least, mean, most] of loss and rate. */
function rows({ first, last, began_s, ended_s, loss, rate }) {
  return first.map((step, at) => ({ first: step, last: last[at], began_s: began_s[at], ended_s: ended_s[at], loss: loss[at], rate: rate[at] }));
}

/** A step that runs again replaces itself and what followed. */
function step(run, row) {
  while (run.recent.length && run.recent.at(-1)[0] >= row[0]) run.recent.pop();
  while (run.buckets.length && run.buckets.at(-1).first >= row[0]) run.buckets.pop();
  run.recent.push(row);
  if (run.recent.length > MOST_RECENT) {
    const old = run.recent.splice(0, MOST_RECENT / 2);
    for (let at = 0; at < old.length; at += 10) run.buckets.push(joined(old.slice(at, at + 10)));
  }
}

function joined(steps) {
  return {
    first: steps[0][0], last: steps.at(-1)[0], began_s: steps[0][1], ended_s: steps.at(-1)[1],
    loss: spread(steps.map((each) => each[2])), rate: spread(steps.map((each) => each[3])),
  };
}

function spread(values) {
  const found = values.filter((value) => value !== null);
  if (!found.length) return [null, null, null];
  return [Math.min(...found), found.reduce((sum, value) => sum + value, 0) / found.length, Math.max(...found)];
}

/** Of sentences that are not among the newest, how many of each kind there were is kept, as the manager does it. */
function mark(run, made) {
  const { older } = run;
  run.marks.push(made);
  for (const { kind, time_s, step } of run.marks.splice(0, run.marks.length - MOST_MARKS)) gather(older, [time_s, time_s, step, { [kind]: 1 }]);
  while (older.rows.length > MOST_OLDER) {
    const rows = older.rows;
    Object.assign(older, { width_s: 2 * older.width_s, rows: [] });
    for (const row of rows) gather(older, row);
  }
}

function gather({ width_s, rows }, [began_s, ended_s, step, counts]) {
  const last = rows.at(-1);
  if (!last || Math.floor(began_s / width_s) > Math.floor(last[0] / width_s)) {
    rows.push([began_s, ended_s, step, { ...counts }]);
    return;
  }
  last[1] = Math.max(last[1], ended_s);
  last[2] = step ?? last[2];
  for (const [kind, count] of Object.entries(counts)) last[3][kind] = (last[3][kind] ?? 0) + count;
}

function band(run, made) {
  const at = run.bands.findIndex((each) => each.generation === made.generation);
  if (at < 0) run.bands.push(made);
  else run.bands[at] = made;
}

/** `all` says that nothing of what was known before holds any more; of a known worker, only what has changed is told. */
function status(run, { all = false, workers = [], gone = [], ...rest }) {
  if (all) Object.assign(run, { status: {}, workers: new Map() });
  Object.assign(run.status, rest);
  for (const name of gone) run.workers.delete(name);
  for (const worker of workers) run.workers.set(worker.name, { ...run.workers.get(worker.name), ...worker });
}

/** All points of the run, the oldest first: one for each bucket and each recent step. */
export function points(run) {
  const recent = run.recent.map(([number, time_s, loss, rate]) => ({
    first: number, last: number, began_s: time_s, ended_s: time_s, loss: [loss, loss, loss], rate: [rate, rate, rate],
  }));
  return run.buckets.concat(recent);
}

export const newest = (run) => run.recent.at(-1) ?? null;

/** Measured stages with their waits told apart, as far as steps of the same generation were looked at. */
export function splitWaits(timed, waits) {
  if (waits?.generation !== timed.generation || waits.transfer_share.length !== timed.stages.length) return timed.stages;
  return timed.stages.map((stage, at) => {
    const transfer_s = stage.waited_s * waits.transfer_share[at];
    return { ...stage, transfer_s, idle_s: stage.waited_s - transfer_s, waited_s: 0 };
  });
}

/** What the run does, as one word that the page's colours follow. */
export function phase(run) {
  if (run.ended) return run.ended.exit_code === 0 ? "ended" : "failed";
  const word = (run.status.state ?? "").split(/[ :]/)[0];
  return ["starting", "forming", "training", "morphing", "finishing", "ended", "without"].includes(word) ? word : "starting";
}

/** Numbers, moments and spans as people read them. Pure. */

/** Four digits, without an exponent where it can be avoided. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "not a number";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

/** Seconds as "3 d 4 h", "12 min", "4.2 s", "12 ms". */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "";
  if (seconds < 0.001) return seconds <= 0 ? "0 s" : "<1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${Number(seconds.toFixed(seconds < 10 ? 1 : 0))} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60]];
  for (const [at, [name, size]] of units.entries()) {
    if (seconds < size) continue;
    const whole = Math.floor(seconds / size), [lower, part] = units[at + 1] ?? ["s", 1];
    const rest = Math.floor((seconds - whole * size) / part);
    return rest ? `${whole} ${name} ${rest} ${lower}` : `${whole} ${name}`;
  }
  return "";
}

/** A plan's "4x1+3x2" as "4 x 1 + 3 x 2", or with its parts alone together where there is little room. */
export const spaced = (shape, roomy = true) => (roomy || !shape.includes("+") ? shape.replaceAll("x", " x ").replaceAll("+", " + ") : shape);

/** A moment in seconds since 1970, as a clock; with the day if it is not today. */
export function clock(time_s) {
  const moment = new Date(time_s * 1000);
  const time = moment.toLocaleTimeString("en-GB");
  return moment.toDateString() === new Date().toDateString() ? time : `${moment.toLocaleDateString("en-CA")} ${time}`;
}

export const percent = (part, digits = 0) => `${(100 * part).toFixed(digits)} %`;

export function bytes(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = value, at = 0;
  while (size >= 1024 && at < names.length - 1) [size, at] = [size / 1024, at + 1];
  return `${Number(size.toPrecision(3))} ${names[at]}`;
}

export const counted = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

const SENTENCES = { lost: "lost worker", morph: "morph", warning: "warning", checkpoint: "checkpoint", notice: "notice", joined: "newcomer", left: "departure", leaving: "leaving machine", asked: "request", failed: "failure" };

/** How many sentences of each kind: "3 lost workers, 1 morph". */
export const tally = (counts) => Object.entries(SENTENCES).filter(([kind]) => counts[kind])
  .map(([kind, word]) => `${counts[kind].toLocaleString("en")} ${word}${counts[kind] === 1 ? "" : "s"}`).join(", ");

/** Round values between two limits, at most so many. */
export function ticks(low, high, most = 5) {
  const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** Round spans of time between two limits in seconds. */
export function timeTicks(low, high, most = 6) {
  const sizes = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800];
  const step = sizes.find((size) => (high - low) / size <= most) ?? 604800;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(Number((at * step).toFixed(3)));
  return found;
}

/** Devices that a plan is for, by class: "8 A100 + 16 V100"; empty where it names none. */
export function classesOf(plan) {
  const found = Array.isArray(plan.classes) ? plan.classes.map(({ name, gpus }) => [name, gpus]) : Object.entries(plan.classes ?? {});
  return found.map(([name, gpus]) => `${gpus} ${name || "others"}`).join(" + ");
}

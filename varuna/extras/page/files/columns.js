/** Thousands of points become as many columns as there are pixels, without losing an extreme. Pure. */

/** Where a point lies on the horizontal axis: by its time, or by its number. */
export const placed = (point, axis) =>
  axis === "time" ? (point.began_s + point.ended_s) / 2 : (point.first + point.last) / 2;

/** From where to where the axis goes: the whole run, or its newest part. */
export function window_(points, axis, share) {
  if (!points.length) return [0, 1];
  const low = axis === "time" ? points[0].began_s : points[0].first;
  const high = axis === "time" ? points.at(-1).ended_s : points.at(-1).last;
  const from = high - (high - low) * share;
  return from < high ? [from, high] : [low - 0.5, low + 0.5];
}

/**
 * Points between `from` and `to`, in at most `most` columns.
 *
 * Returns a list of {x, loss: [least, mean, most], rate: [...], point}; `point` is the newest one of a column.
 */
export function columns(points, axis, [from, to], most) {
  const found = [], size = (to - from) / most;
  for (const point of points) {
    const x = placed(point, axis);
    if (x < from || x > to) continue;
    const at = Math.min(most - 1, Math.floor((x - from) / size)), column = found.at(-1);
    if (column?.at !== at) {
      found.push({ at, x, loss: [...point.loss], rate: [...point.rate], count: 1, point });
      continue;
    }
    column.count += 1;
    column.point = point;
    column.x += (x - column.x) / column.count;
    join(column.loss, point.loss, column.count);
    join(column.rate, point.rate, column.count);
  }
  return found;
}

function join(known, more, count) {
  if (more[1] === null) return;
  if (known[1] === null) {
    known.splice(0, 3, ...more);
    return;
  }
  known[0] = Math.min(known[0], more[0]);
  known[1] += (more[1] - known[1]) / count;
  known[2] = Math.max(known[2], more[2]);
}

/** Limits of some values with a little room around them; throughput begins at 0. */
export function limits(found, name) {
  const values = found.flatMap((column) => column[name]).filter((value) => value !== null);
  if (!values.length) return [0, 1];
  const high = values.reduce((a, b) => Math.max(a, b)), low = name === "rate" ? 0 : values.reduce((a, b) => Math.min(a, b));
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [name === "rate" ? 0 : low - room, high + room];
}

/** Plans as spans on the axis, as they are in the middle of each piece of `size`: {from, to, band}. */
export function spans(bands, axis, [from, to], size) {
  const found = [], place = (band) => (axis === "time" ? band.time_s : band.step);
  for (let begin = from, at = -1; begin < to && bands.length; begin += size) {
    while (at + 1 < bands.length && place(bands[at + 1]) <= begin + size / 2) at++;
    const band = bands[at], end = Math.min(to, begin + size), before = found.at(-1);
    if (!band) continue;
    if (before?.band.shape === band.shape) before.to = end;
    else found.push({ from: begin, to: end, band });
  }
  return found;
}

/**
 * Sentences of the story between `from` and `to`, in columns of equal size: {x, counts, only}, the leftmost first.
 *
 * `older` are rows of begin, end, step and counts by kind; `only` is the text where a column has one newer sentence alone.
 */
export function gathered(marks, older, axis, [from, to], most) {
  const found = new Map(), size = (to - from) / most;
  const take = (at, counts, text) => {
    if (at === null || at < from || at > to) return;
    const place = Math.min(most - 1, Math.floor((at - from) / size)), known = found.get(place);
    if (!known) found.set(place, { at: place, x: at, counts: { ...counts }, only: text });
    else {
      for (const [kind, count] of Object.entries(counts)) known.counts[kind] = (known.counts[kind] ?? 0) + count;
      known.only = null;
    }
  };
  for (const [began_s, ended_s, step, counts] of older) take(axis === "time" ? (began_s + ended_s) / 2 : step, counts, null);
  for (const mark of marks) take(axis === "time" ? mark.time_s : mark.step, { [mark.kind]: 1 }, mark.text);
  return [...found.values()].sort((a, b) => a.at - b.at);
}

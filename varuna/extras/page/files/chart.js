/** The curve of a run: loss, throughput, and the plans as bands below; with a line that reads values off. */

import { columns, gathered, limits, spans, window_ } from "./columns.js";
import { byId, draw, legend, say } from "./dom.js";
import { clock, number, span, tally, ticks, timeTicks } from "./format.js";
import { points } from "./model.js";

const LEFT = 58, RIGHT = 12, LOSS = [10, 168], RATE = [190, 266], BANDS = [292, 316], FOOT = 338, HEIGHT = 344, MOST_LINES = 30;
const GLYPHS = { lost: "✕", warning: "!", leaving: "▾", checkpoint: "◆" };
const LANES = { lost: RATE[1] + 11, warning: RATE[1] + 11, leaving: RATE[1] + 11, checkpoint: RATE[1] + 23 };
const LEAST_BAND = 4, SIGN = 9, MORPHS = [172, 184]; // pixels: of a band and of a sign, and where many morphs are counted
const view = { axis: "time", share: 1, reading: null };
const shapes = [];
let drawn = null;

/** Draw the run; `again()` asks for another drawing, and `showNear(step)` shows a step's picture. */
export function prepareChart(again, showNear) {
  for (const button of document.querySelectorAll("[data-axis], [data-range]")) {
    button.addEventListener("click", () => {
      if (button.dataset.axis) view.axis = button.dataset.axis;
      else view.share = Number(button.dataset.range);
      for (const other of button.parentElement.children) other.setAttribute("aria-pressed", other === button);
      view.reading = null;
      again();
    });
  }
  const chart = byId("chart");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    readAt(event.clientX - box.left);
  });
  chart.addEventListener("pointerleave", () => readNothing());
  chart.addEventListener("click", () => {
    if (view.reading !== null && drawn?.found[view.reading]) showNear(drawn.found[view.reading].point.last);
  });
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Escape") readNothing();
    if (event.key === "Enter" && view.reading !== null && drawn?.found[view.reading]) showNear(drawn.found[view.reading].point.last);
    if (!move || !drawn?.found.length) return;
    event.preventDefault();
    const last = drawn.found.length - 1;
    read(Math.max(0, Math.min(last, (view.reading ?? last) + move)));
  });
  new ResizeObserver(again).observe(chart);
  legend(byId("marks-legend"), [["line loss", "loss"], ["line rate", "examples per second"], ["line morph", "morph"],
    ["glyph-lost", "worker lost"], ["glyph-leaving", "notice that a machine leaves"], ["glyph-checkpoint", "checkpoint"], ["glyph-warning", "warning"]]);
}

export function drawChart(run) {
  const all = points(run), width = Math.max(280, byId("chart").clientWidth), inner = width - LEFT - RIGHT;
  const range = window_(all, view.axis, view.share), found = columns(all, view.axis, range, Math.floor(inner / 1.5));
  const x = (at) => LEFT + ((at - range[0]) / (range[1] - range[0])) * inner;
  const svg = draw("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
  if (!found.length) {
    svg.append(draw("text", { x: width / 2, y: 140, class: "empty", "text-anchor": "middle" }, run.ended ? "No step was trained." : "The first step will appear here."));
  } else {
    panel(svg, found, "loss", "loss", LOSS, x, width);
    panel(svg, found, "rate", "examples/s", RATE, x, width);
    bands(svg, run, range, x, inner);
    axis(svg, range, all, x);
    marks(svg, run, range, x);
  }
  drawn = { found, x, run, line: draw("line", { class: "reading", y1: LOSS[0], y2: BANDS[1] }) };
  svg.append(drawn.line);
  byId("chart").replaceChildren(svg);
  if (view.reading !== null && view.reading < found.length) read(view.reading);
  else say(byId("reading"), found.length ? summary(all) : "");
}

const summary = (all) => `${(all.at(-1).last - all[0].first + 1).toLocaleString("en")} steps in ${span(all.at(-1).ended_s - all[0].began_s) || "no time"}`;

function panel(svg, found, name, title, [top, bottom], x, width) {
  const [low, high] = limits(found, name), y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  for (const value of ticks(low, high, name === "loss" ? 5 : 3)) {
    if (y(value) < top || y(value) > bottom) continue;
    svg.append(draw("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  const known = found.filter((column) => column[name][1] !== null);
  const at = (column, which) => `${x(column.x).toFixed(1)},${y(column[name][which]).toFixed(1)}`;
  const upper = known.map((column) => at(column, 2)), lower = known.toReversed().map((column) => at(column, 0));
  svg.append(draw("path", { class: `spread ${name}`, d: `M${[...upper, ...lower].join("L")}Z` }));
  svg.append(draw("path", { class: `curve ${name}`, d: `M${known.map((column) => at(column, 1)).join("L")}` }));
  svg.append(draw("text", { class: "title", x: LEFT + 6, y: top + 12 }, title));
  for (const column of found) {
    if (column[name][1] === null) svg.append(draw("text", { class: "nan", x: x(column.x), y: bottom - 2, "text-anchor": "middle" }, "×"));
  }
}

function bands(svg, run, range, x, inner) {
  const [top, bottom] = BANDS, least = (LEAST_BAND * (range[1] - range[0])) / inner;
  for (const { from, to, band } of spans(run.bands, view.axis, range, least)) {
    const shape = band.shape, width = Math.max(1, x(to) - x(from));
    if (!shapes.includes(shape)) shapes.push(shape);
    const title = draw("title", {}, `generation ${band.generation}: plan ${shape} from step ${band.step}`);
    svg.append(draw("rect", { class: `band band${shapes.indexOf(shape) % 6}${width > 2 * LEAST_BAND ? " wide" : ""}`, x: x(from), y: top, width, height: bottom - top }, title));
    if (width > 9 * shape.length) svg.append(draw("text", { class: "band-name", x: x(from) + 5, y: bottom - 8 }, shape));
  }
  svg.append(draw("text", { x: LEFT - 6, y: bottom - 8, "text-anchor": "end" }, "plan"));
}

function axis(svg, [from, to], all, x) {
  const origin = all[0].began_s;
  const found = view.axis === "time"
    ? timeTicks(from - origin, to - origin).map((at) => [x(at + origin), span(at)])
    : ticks(from, to, 6).filter(Number.isInteger).map((at) => [x(at), `step ${at.toLocaleString("en")}`]);
  for (const [at, text] of found) {
    if (at > x(to) - 26) continue;
    svg.append(draw("text", { x: at, y: FOOT, "text-anchor": "middle" }, text));
  }
}

/** Morphs as lines through both curves, or where they are many as bars that count them; other marks as signs. */
function marks(svg, run, range, x) {
  const place = (mark) => (view.axis === "time" ? mark.time_s : mark.step);
  const isSeen = (mark) => place(mark) !== null && place(mark) >= range[0] && place(mark) <= range[1];
  const most = Math.max(1, Math.floor((x(range[1]) - x(range[0])) / SIGN));
  const places = gathered(run.marks, run.older.rows, view.axis, range, most);
  const each = places.map(({ counts }) => counts.morph ?? 0), morphs = each.reduce((sum, count) => sum + count, 0), highest = Math.max(...each);
  const known = run.marks.filter((mark) => mark.kind === "morph" && isSeen(mark)), areMany = morphs > Math.min(MOST_LINES, known.length);
  for (const mark of areMany ? [] : known) {
    svg.append(draw("line", { class: "morph", x1: x(place(mark)), x2: x(place(mark)), y1: LOSS[0], y2: RATE[1] }, draw("title", {}, mark.text)));
  }
  for (const { at, counts, only } of places) {
    const left = x(range[0]) + at * SIGN, title = () => draw("title", {}, only ?? tally(counts));
    if (areMany && counts.morph) {
      const height = Math.max(2, ((MORPHS[1] - MORPHS[0]) * counts.morph) / highest);
      svg.append(draw("rect", { class: "morphs", x: left + 1, y: MORPHS[1] - height, width: SIGN - 2, height }, title()));
    }
    const worst = counts.lost || counts.failed ? "lost" : counts.warning ? "warning" : counts.leaving ? "leaving" : "";
    for (const kind of [worst, counts.checkpoint ? "checkpoint" : ""].filter(Boolean)) {
      svg.append(draw("text", { class: `glyph glyph-${kind}`, x: left + SIGN / 2, y: LANES[kind], "text-anchor": "middle" }, title(), GLYPHS[kind]));
    }
  }
}

function readAt(left) {
  if (!drawn?.found.length) return;
  const gaps = drawn.found.map((column) => Math.abs(drawn.x(column.x) - left));
  read(gaps.indexOf(Math.min(...gaps)));
}

function read(index) {
  const column = drawn.found[index], { point } = column, at = drawn.x(column.x);
  view.reading = index;
  drawn.line.setAttribute("x1", at);
  drawn.line.setAttribute("x2", at);
  drawn.line.classList.add("shown");
  const many = column.loss[0] !== column.loss[2], band = drawn.run.bands.findLast((each) => each.step <= point.last);
  const between = many ? ` (${number(column.loss[0])} to ${number(column.loss[2])})` : "";
  const plan = band ? `, plan ${band.shape}` : "";
  say(byId("reading"), `step ${point.last.toLocaleString("en")}, ${clock(point.ended_s)}: loss ${number(column.loss[1], 5)}${between}, `
    + `${number(column.rate[1], 3)} examples/s${plan}`);
}

function readNothing() {
  view.reading = null;
  drawn?.line.classList.remove("shown");
  if (drawn?.found.length) say(byId("reading"), summary(points(drawn.run)));
}

"""A run on a part of a terminal: what it does, its numbers, its plan, its workers, the last of its story. Pure."""

import time
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from varuna.core.units import counted, format_duration, format_rate, step_number, time_left
from varuna.observe.health import doing
from varuna.observe.seats import grid, without_seat
from varuna.observe.split import HEIGHT, split_table

_STATES = {"training": "green", "finishing": "cyan"}
_KINDS = {
    "lost": "red",
    "warning": "red",
    "failed": "red",
    "morph": "yellow",
    "asked": "cyan",
    "notice": "dim",
    "leaving": "yellow",
    "begin": "green",
    "left": "dim",
    "joined": "dim",
}
_UNTOLD = {"checkpoint", "ended", "joined"}
"""Said elsewhere in the view."""
_ENDLESS_STEPS = 10**8
_NARROW = 60
_LONG_S = 99.0
_ROOM_FOR_SPLIT = HEIGHT + 6
"""Lines below the numbers: the story and a grid of two rows come first."""
_LEVELS = "▁▂▃▄▅▆▇█"
_BETWEEN = "   "


def live_view(
    status: Mapping[str, Any],
    width: int,
    rows: int,
    *,
    plain: bool = False,
    doing_s: float | None = None,
    heads: Sequence[RenderableType] = (),
) -> RenderableType:
    """Return the answer of ``/status`` in at most ``rows`` lines of ``width`` columns.

    Args:
        status: what the manager says.
        width: columns; below 60 there is no bar.
        rows: lines. Few show the state and the numbers, more the story too, then the workers, then a step's parts.
        plain: only ASCII can be shown.
        doing_s: for how long the run has done what it does.
        heads: lines before everything else.
    """
    fixed = [*heads, headline(status, width, doing_s), *numbers(status, width, plain=plain)][: max(1, rows)]
    left = rows - len(fixed)
    split = split_table(status, width) if left >= _ROOM_FOR_SPLIT else []
    left -= _height(split)
    sentences = [sentence(mark, width) for mark in untold_marks(status["marks"])]
    story_rows = sum(map(len, sentences))
    spares = without_seat(status)
    # The story gets a third of the room, and what the workers leave of the rest.
    told_rows = min(story_rows, max(2, left // 3), left)
    workers = grid(status, width, left - told_rows - bool(spares), plain=plain)
    if workers and spares:
        workers.append(_line(spares, "dim"))
    return Group(*fixed, *split, *workers, *_newest(sentences, left - _height(workers)))


def rule(*, plain: bool) -> RenderableType:
    """Return the rule between the view and the lines above it."""
    return Rule(style="dim", characters="-" if plain else "─")


def headline(status: Mapping[str, Any], width: int, doing_s: float | None) -> RenderableType:
    """State, step, a bar and the time left on one line; of a run that stands still, since when and why."""
    if status.get("waits_for"):
        return Text(doing(status), style="bold red")
    state = Text(no_wrap=True, overflow="ellipsis")
    state.append(doing(status), style=f"bold {_STATES.get(status['state'], 'yellow')}")
    if status.get("doing") and doing_s is not None:
        state.append(f"  {format_duration(round(doing_s)) if doing_s > _LONG_S else f'{doing_s:.0f} s'}")
    step, total = status["step"], status["steps"]
    if step is None:
        return state
    number = status.get("training", 1)
    of = f"training {number}, " if number > 1 and not status.get("doing") else ""
    counts = Text(f"{of}step {step_number(step, total)}", no_wrap=True, overflow="ellipsis")
    is_training = status["state"] == "training"
    left = Text(time_left(status["left_s"] or 0.0).strip() if is_training else "", no_wrap=True)
    has_end = bool(total) and total < _ENDLESS_STEPS
    if not has_end or not is_training or width < _NARROW or len(state.plain) > width // 3:
        return _joined([state, counts, left])
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_column(no_wrap=True)
    bar = ProgressBar(total=total, completed=step + 1, style="dim", complete_style="green", finished_style="green")
    line.add_row(state, counts, bar, f"{100 * (step + 1) / total:.0f} %", left)
    return line


def numbers(status: Mapping[str, Any], width: int, *, plain: bool = False) -> list[Text]:
    """Loss, speed and plan; then what is kept, what it has cost, and what is left of its budget."""
    found: list[Text] = []
    if status["step"] is not None:
        loss = "nan" if status["loss"] is None else f"{status['loss']:.4f}"
        curve = "" if plain else sparkline(status["curve"])
        phrases = [
            *([f"step {step_number(status['step'], status['steps'])}"] if status.get("waits_for") else []),
            f"loss {loss}  {curve}".rstrip(),
            *([] if status.get("waits_for") else [f"{format_rate(status['examples_per_s'])} examples/s"]),
            *([] if status.get("waits_for") else _step_time(status)),
        ]
        found += _flowed(phrases, width)
    if (plan := status["plan"]) is not None:
        found += _flowed(plan_words(plan, status["generation"]), width)
    return [*found, *_flowed([*_kept(status), *_spent(status)], width)]


def plan_words(plan: Mapping[str, Any], generation: int) -> list[str]:
    """``plan 2x3: 2 stages x 3 replicas``, ``12 micro-batches of 2``, ``generation 1``."""
    micro_batches = -(-plan["global_batch"] // plan["micro_batch"])
    shape = f"{counted(plan['stages'], 'stage')} x {counted(plan['replicas'], 'replica')}"
    if len({*plan["depths"]}) > 1:
        shape = f"{plan['replicas']} pipelines of {', '.join(map(str, plan['depths']))} stages"
    classes = plan.get("classes", {})  # a record of an older version says nothing of them
    return [
        f"plan {plan['shape']}: {shape}",
        *([f"on {' and '.join(f'{count} {name}' for name, count in classes.items())}"] if classes else []),
        f"{counted(micro_batches, 'micro-batch')} of {plan['micro_batch']}",
        f"generation {generation}",
    ]


def _step_time(status: Mapping[str, Any]) -> list[str]:
    if not status["step_s"]:
        return []
    measured, timed = format_duration(status["step_s"]), status["timed"]
    if timed is not None and timed["generation"] == status["generation"] and not timed["is_nominal"]:
        return [f"a step takes {measured}, predicted {format_duration(timed['predicted_s'])}"]
    return [f"a step takes {measured}"]


def _kept(status: Mapping[str, Any]) -> list[str]:
    if not status["checkpoint_dir"] or status.get("rescues"):  # those go with the run
        return ["no checkpoints"] if status["steps"] else []
    return [_newest_checkpoint(status), *_saving(status)]


def _newest_checkpoint(status: Mapping[str, Any]) -> str:
    checkpoint = status["checkpoint"]
    if checkpoint is None:
        return "no checkpoint yet"
    if checkpoint.get("resumed"):
        return f"resumed from the checkpoint of step {checkpoint['step']}"
    return f"checkpoint step {checkpoint['step']}, {clock(checkpoint['time_s'])}"


def _saving(status: Mapping[str, Any]) -> list[str]:
    """An unfinished checkpoint, while one is under way."""
    saving = status.get("saving")
    if saving is None:
        return []
    parts = (
        f"{saving['parts']} of {saving['of']} parts" if saving["of"] is not None else counted(saving["parts"], "part")
    )
    return [f"step {saving['step']}: {parts} uploaded"]


def _spent(status: Mapping[str, Any]) -> list[str]:
    cost, budget = status["cost"], status.get("budget")
    return [*([] if cost is None else [cost["words"]]), *([] if budget is None else budget["phrases"])]


def untold_marks(marks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the marks of the story that the view shows nowhere else."""
    return [mark for mark in marks if mark["kind"] not in _UNTOLD]


def sentence(mark: Mapping[str, Any], width: int) -> list[Text]:
    """Return a mark of the story in at most two lines."""
    at, style = f"{clock(mark['time_s'])}  ", _KINDS.get(mark["kind"], "")
    first = mark["text"].partition("\n")[0]
    lines: list[Text] = []
    for text in wrap(first, max(10, width - len(at)), max_lines=2, placeholder=" ..."):
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(at if not lines else " " * len(at), style="dim")
        line.append(text, style=style)
        lines.append(line)
    return lines


def _newest(sentences: Sequence[Sequence[Text]], rows: int) -> list[Text]:
    """The last sentences that fit whole; of a single one that does not, its beginning."""
    lines: list[Text] = []
    for each in reversed(sentences):
        if len(lines) + len(each) > rows:
            break
        lines = [*each, *lines]
    return lines if lines or not sentences else list(sentences[-1][: max(0, rows)])


def sparkline(values: Sequence[float | None]) -> str:
    """Return a character for each value, the higher the greater; a blank for None. Empty for less than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    least, span = min(known), (max(known) - min(known)) or 1.0
    most = len(_LEVELS) - 1
    return "".join(" " if value is None else _LEVELS[round((value - least) / span * most)] for value in values)


def clock(time_s: float) -> str:
    """Return a moment, in seconds since 1970, as local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _flowed(phrases: Sequence[str], width: int) -> list[Text]:
    """Phrases in as few lines as hold them whole."""
    lines: list[str] = []
    for phrase in phrases:
        if lines and len(lines[-1]) + len(_BETWEEN) + len(phrase) <= width:
            lines[-1] += _BETWEEN + phrase
        else:
            lines.append(phrase)
    return [_line(line, "") for line in lines]


def _joined(parts: Sequence[Text]) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for part in parts:
        if part.plain:
            line.append_text(Text("  ") if line.plain else Text("")).append_text(part)
    return line


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _height(workers: Sequence[RenderableType]) -> int:
    return sum(each.row_count + 1 if isinstance(each, Table) else 1 for each in workers)

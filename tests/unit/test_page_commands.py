"""The commands on pages: each one's subcommand and options exist; those that need nothing are run as printed."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from varuna.cli.main import app
from varuna.core.errors import VarunaError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in ("docs", "examples", "deploy") for page in sorted(ROOT.glob(f"{folder}/**/*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.M | re.S)
INDENTED = re.compile(r"(?:^    \S.*\n)+(?:^     .*\n)*", re.M)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
COMMAND = re.compile(r"^(?:\$ |exec |@)?((?:varuna|make|python|pytest)(?: .*)?)$")
PROSE = re.compile(r"\bvaruna:|…")

RUN = (
    "varuna simulate --unit --stages 8 --micro-batches 32 --network 0.05,0.4,0.2 --svg step.svg",
    "varuna plan --calibration examples/calibrations/gpt2-2.5b-v100.json --gpus 100",
    "varuna completion bash >> ~/.bashrc",
)
"""Commands of pages that need no script, no machine and no time."""
NOT_RUN = {
    "varuna agent": "needs a manager: tests/scenarios/test_cluster.py",
    "varuna calibrate": "takes some seconds: tests/scenarios/test_calibrating.py",
    "varuna checkpoints": "needs a run's checkpoints: tests/scenarios/test_kills.py",
    "varuna completion": "of another shell",
    "varuna demo": "takes three minutes",
    "varuna doctor": "needs a run: tests/scenarios/test_cluster.py",
    "varuna drain": "needs a run: tests/scenarios/test_planned.py",
    "varuna inspect": "needs a script: tests/scenarios/test_launching.py",
    "varuna join-token": "needs a run: tests/scenarios/test_cluster.py",
    "varuna list": "needs a run: tests/scenarios/test_cluster.py",
    "varuna logs": "needs a run: tests/scenarios/test_cluster.py",
    "varuna manager": "does not end: tests/scenarios/test_cluster.py",
    "varuna morph": "needs a run: tests/scenarios/test_planned.py",
    "varuna offers": "takes longer, and needs a file of offers: tests/unit/extras/replay/test_offers.py",
    "varuna open": "needs a run: tests/unit/cli",
    "varuna plan": "takes longer, or needs a script: tests/unit/cli/test_plan.py",
    "varuna profile": "needs a run: tests/scenarios/test_timeline.py",
    "varuna replay": "takes some seconds: tests/unit/extras/replay",
    "varuna run": "trains: tests/scenarios/test_launching.py",
    "varuna simulate": "of other arguments: tests/unit/cli",
    "varuna status": "needs a run: tests/scenarios/test_cluster.py",
    "varuna stop": "needs a run: tests/scenarios/test_cluster.py",
    "varuna timeline": "needs a run: tests/scenarios/test_timeline.py",
    "make": "takes minutes, or needs a network",
    "python": "measures for minutes, or trains",
    "pytest": "is what runs now",
}
"""Reasons why the other commands of a kind are not run here, and the places where they are."""


COMMANDS: Any = typer.main.get_command(app)


class Printed(NamedTuple):
    page: str
    line: str

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def commands(page: Path) -> Iterator[Printed]:
    """Yield what a reader may type: lines of blocks without a language, and what is quoted in a line."""
    text = page.read_text()
    name = page.relative_to(ROOT).as_posix()
    blocks = [body for _, language, body in FENCE.findall(text) if language in ("", "sh", "bash", "console")]
    rest = FENCE.sub("", text)
    blocks += INDENTED.findall(rest)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(quoted.split()) for quoted in INLINE.findall(INDENTED.sub("", rest))]
    for line in (part for each in lines for part in each.split(" && ")):
        if (found := COMMAND.match(line.strip())) and not PROSE.search(line):
            yield Printed(name, re.sub(r"\s{2,}.*|\s+#.*|\s+>+ .*", "", found[1]).strip())


EVERY = [each for page in PAGES for each in commands(page)]


def words_of(line: str) -> list[str]:
    """As a shell splits it; brackets say only that something may be left out."""
    return shlex.split(re.sub(r"\[the .*?\]|[\[\]]", "", line.replace(" ...", "")))


def complaint(line: str) -> str | None:
    """Name the part of a command that does not exist; None if all of it does."""
    match words_of(line):
        case ["varuna", *rest]:
            return of_varuna(rest)
        case ["make", *rest]:
            return of_make(rest)
        case ["python", "-m", module, *rest] if module.split(".")[0] in ("benchmarks", "tests", "docs"):
            place = ROOT / module.replace(".", "/")
            source = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__main__.py"
            return of_script(source, rest)
        case ["python", script, *rest] if script.endswith(".py") and "/" in script:
            return of_script(ROOT / script, rest)
    return None


def of_varuna(words: list[str]) -> str | None:
    """Against the command line's own description of itself; values are not looked at."""
    command = COMMANDS
    if not words or words[0].startswith("-") or words[0].isupper():
        return None
    while hasattr(command, "commands"):
        if not words or words[0].startswith("-"):
            return None
        name, *words = words
        if name not in command.commands:
            return f"there is no command {name}"
        command = command.commands[name]
    return of_options(command, words)


def of_options(command: Any, words: list[str]) -> str | None:
    """Whether the command has these options, and its script the others."""
    context = typer.Context(command)
    if "--on" in words[:-1]:
        context.meta["varuna.engine"] = words[words.index("--on") + 1]
    options = {name: each for each in command.get_params(context) for name in (*each.opts, *each.secondary_opts)}
    rest = iter(words)
    for word in rest:
        if word == "--":
            return None
        if word.startswith("-"):
            option = options.get(word.partition("=")[0])
            if option is None:
                return f"varuna {command.name} has no option {word}"
            if not getattr(option, "is_flag", False) and "=" not in word:
                next(rest, None)
        elif not command.context_settings.get("allow_interspersed_args", True):
            return of_script(ROOT / word, list(rest)) if word.startswith("examples/") else None
    return None


def of_make(words: list[str]) -> str | None:
    for word in words:
        name, is_given, _ = word.partition("=")
        if not re.search(rf"^{name} ?\??:?=" if is_given else rf"^{name}:", MAKEFILE, re.M) and name != "PYTHON":
            return f"the Makefile has no {name}"
    return None


def of_script(path: Path, words: list[str]) -> str | None:
    if not path.is_file():
        return f"there is no {path.relative_to(ROOT)}"
    source = (
        "".join(each.read_text() for each in path.parent.glob("*.py")) if "examples" in path.parts else path.read_text()
    )
    missing = [word for word in words if word.startswith("--") and word.partition("=")[0] not in source]
    return f"{path.name} knows no {missing[0]}" if missing else None


def test_what_does_not_exist_is_noticed() -> None:
    assert complaint("varuna run --workers 2 train.py --any thing") is None
    assert complaint("varuna run --on slurm --partition spot --nodes 4:32 train.py") is None
    for wrong in (
        "varuna tidy",
        "varuna run --partition spot train.py",
        "varuna checkpoints burn DIR",
        "varuna run examples/gpt2_text/train.py --layres 3",
        "make tea",
        "make demo TEA=1",
        "python -m benchmarks.nothing",
        "python benchmarks/recovery.py --nothing 1",
    ):
        assert complaint(wrong), wrong


def test_every_command_on_a_page_exists() -> None:
    assert len(EVERY) > 200, "the patterns find no commands any more"
    wrong = [f"{each}: {found}" for each in EVERY if (found := complaint(each.line))]
    assert not wrong, "\n".join(wrong)


def test_every_kind_of_command_is_run_or_has_a_reason_not_to_be() -> None:
    kinds = {" ".join(words_of(each.line)[: 1 + each.line.startswith("varuna ")]) for each in EVERY}
    unknown = {kind for kind in kinds if kind not in NOT_RUN and not re.fullmatch(r"varuna( [-A-Z].*)?", kind)}
    assert not unknown, f"run these, or say in NOT_RUN why not: {sorted(unknown)}"
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"tests/[\w/.]+", reason)}
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("line", RUN)
def test_a_command_that_needs_nothing_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = re.sub(r"\s+>+ .*", "", line)
    assert any(each.line == printed for each in EVERY), "no page has this command any more"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(printed)[1:])
    assert done.exit_code == 0, (done.output, done.exception)
    assert not isinstance(done.exception, VarunaError)
    assert done.output

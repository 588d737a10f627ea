"""Run the examples of the gallery as a newcomer would, and write what they take into docs/gallery.md.

python -m benchmarks.gallery            all of them, in some minutes
python -m benchmarks.gallery lora t5    some of them
"""

import argparse
import datetime
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
FOLDER = "examples/gallery/"
COMPARED = 2
"""the step, of an example's first run, whose loss tests compare with the page's"""
LOSS = re.compile(r"^step \d+ loss (\S+)$", re.M)
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
MEASURED = re.compile(r"^\*Measured .*\*$", re.M)


@dataclass(frozen=True)
class Example:
    """A script of examples/gallery."""

    name: str
    shows: str
    script: str
    options: str = ""
    first: str = ""
    """options with which the script is run before that"""

    @property
    def runs(self) -> tuple[str, ...]:
        """The script and its options, in turn; the losses are those of the last."""
        each = (self.first, self.options) if self.first else (self.options,)
        return tuple(f"{self.script} {options}".rstrip() for options in each)

    @property
    def command(self) -> str:
        """Command that a reader types in that folder."""
        return " && ".join(f"python {run}" for run in self.runs)

    def row(self, minutes: float, compared: float, last: float) -> str:
        """Return its row of the page's table."""
        return f"| {self.name} | {self.shows} | `{self.command}` | {minutes:.1f} | {compared:.4f} | {last:.4f} |"


EXAMPLES = (
    Example("char-gpt", "a character-level GPT in plain PyTorch", "char_gpt.py"),
    Example("gpt2", "GPT-2 of Hugging Face", "families.py", "--family gpt2"),
    Example("llama", "Llama of Hugging Face", "families.py", "--family llama"),
    Example("qwen-moe", "Qwen's mixture of experts and its balancing loss", "families.py", "--family qwen-moe"),
    Example("lora", "adapters of PEFT over a frozen Llama", "lora.py"),
    Example("bert", "BERT guesses masked bytes", "bert_masked.py"),
    Example("t5", "T5 summarises docstrings", "t5_summaries.py"),
    Example("vit", "a Vision Transformer on real images, and what it gets right of others", "vit_digits.py"),
    Example("resnet", "a ResNet with batch normalisation", "resnet_digits.py"),
    Example("lamb", "LAMB, with one norm shared by all stages", "lamb.py"),
    Example(
        "safetensors",
        "makes a folder of safetensors, and goes on from it with another text",
        "from_safetensors.py",
        "--weights base",
        first="--export base",
    ),
)


def cores_s() -> float:
    """Seconds of a core that all processes that have ended have taken: the same on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(example: Example, folder: Path) -> str:
    """Run it in one process, in ``folder``; its row.

    Raises:
        RuntimeError: it failed.
    """
    before_s, losses = cores_s(), []
    for run in example.runs:
        script, *options = run.split()
        command = [sys.executable, str(ROOT / FOLDER / script), *options]
        done = subprocess.run(command, cwd=folder, env=ONE_THREAD, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{example.name} failed:\n{done.stderr}")
        losses.append([float(loss) for loss in LOSS.findall(done.stdout)])
        print(done.stderr, *done.stdout.splitlines()[-2:], sep="\n", flush=True)
    return example.row((cores_s() - before_s) / 60, losses[0][COMPARED], losses[-1][-1])


def rewritten(page: str, rows: dict[str, str]) -> str:
    """The page with other rows for the examples named."""
    for name, row in rows.items():
        literally = row.replace("\\", r"\\")
        page = re.sub(rf"^\| {name} \| .*$", literally, page, flags=re.M)
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    names = parser.parse_args().names
    for example in EXAMPLES:
        if not names or example.name in names:
            with tempfile.TemporaryDirectory() as folder:
                row = measure(example, Path(folder))
            print(row, flush=True)
            PAGE.write_text(rewritten(PAGE.read_text(), {example.name: row}))
    if not names:
        said = f"*Measured {datetime.date.today()}, one of {os.cpu_count()} cores, Python {platform.python_version()}.*"
        PAGE.write_text(MEASURED.sub(said, PAGE.read_text()))


if __name__ == "__main__":
    main()

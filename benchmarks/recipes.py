"""Run the commands of docs/recipes.md as a reader would, and write there what each ends with.

python -m benchmarks.recipes            all of them, in some minutes
python -m benchmarks.recipes sft dpo    some of them
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
FOLDER = ROOT / "examples" / "recipes"
COMMANDS = re.compile(
    r"```\npython examples/recipes/tiny\.py (?P<kind>\w+) tiny\n(?P<command>varuna run -n 3 .*)\n```\n\n"
    r"The last loss is (?P<last>\d+\.\d+)\."
)
"""Lines of the page on a recipe's tiny run: its command, and its last loss."""
LOSS = re.compile(r"^step \d+ loss (\S+)$", re.M)


def last_loss(kind: str, command: str) -> float:
    """Run the recipe in the current folder as the page starts it, and return its last loss."""
    Path("examples").symlink_to(ROOT / "examples")
    for words in (["examples/recipes/tiny.py", kind, "tiny"], ["-m", *shlex.split(command)]):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(words)} failed:\n{done.stderr}")
    return float(LOSS.findall(done.stdout)[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    args = parser.parse_args()
    head, *sections = PAGE.read_text().split("\n## ")
    for at, section in enumerate(sections):
        found = COMMANDS.search(section)
        if found is None or (args.names and found["kind"] not in args.names):
            continue
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            said = f"The last loss is {last_loss(found['kind'], found['command']):.4f}."
        sections[at] = re.sub(r"The last loss is \d+\.\d+\.", said, section)
        PAGE.write_text("\n## ".join((head, *sections)))


if __name__ == "__main__":
    main()

"""Judge jobs of the field, list them, or write the table of what was found.

Ends with 1 if a job is wrong, hangs or crashes, or if one is not right that is so in verdicts.jsonl.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.field import libraries
from tests.field.judge import BAD, RIGHT

if TYPE_CHECKING:
    from tests.field.jobs import Job

KEPT = Path(__file__).with_name("verdicts.jsonl")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--family", default="", help="only jobs whose name holds this")
    parser.add_argument("--job", action="append", default=[], help="this job; may be given several times")
    parser.add_argument(
        "--sample",
        type=int,
        help="only this number of jobs: one of each kind of model, then in an order drawn once for all",
    )
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="judge this number of jobs at a time")
    parser.add_argument("--briefly", action="store_true", help="in one plan, of two stages and two replicas")
    parser.add_argument("--begun-within", type=float, default=float("inf"), help="begin no job later, in seconds")
    parser.add_argument("--breadth", action="store_true", help="one job of each family")
    parser.add_argument("--column", action="append", default=[], help="again, those with this verdict, such as crash")
    parser.add_argument("--shard", type=_shard, default=(1, 1), help="K/N: the K-th of N parts, which may run at once")
    parser.add_argument("--results", type=Path, default=KEPT)
    parser.add_argument("--fresh", action="store_true", help="judge everything, and keep no results")
    parser.add_argument("--loud", action="store_true", help="show what jobs print")
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    parser.add_argument("--table", type=Path, help="write the page of all results, and judge nothing")
    return parser.parse_args()


def _shard(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not 1 <= int(number) <= int(parts):
        raise argparse.ArgumentTypeError(f"needs K/N with K from 1 to N, such as 1/2; found {text}")
    return int(number), int(parts)


def main() -> int:
    """Do what the arguments say; return the exit code."""
    arguments = _arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    libraries.load()
    from tests.field import catalogue, report, sweep

    if arguments.fresh:
        with tempfile.NamedTemporaryFile(prefix="field-", suffix=".jsonl", delete=False) as file:
            arguments.results = Path(file.name)
    known = sweep.done(arguments.results)
    every = catalogue.all_jobs()
    if arguments.table:
        arguments.table.write_text(report.page(tuple(every), known, report.versions(_commit())))
        sweep.compact(arguments.results)
        return 0
    jobs = catalogue.chosen(
        every, part=arguments.family, names=arguments.job, first=arguments.sample, breadth=arguments.breadth
    )
    if arguments.column:
        jobs = tuple(job for job in jobs if job.name in known and known[job.name]["column"] in arguments.column)
    elif not arguments.job:
        jobs = tuple(job for job in jobs if job.name not in known)
    number, parts = arguments.shard
    jobs = jobs[number - 1 :: parts]
    if arguments.list:
        print("\n".join(job.name for job in jobs))
        return 0
    expected = sweep.done(KEPT)

    def judge(part: "Sequence[Job]") -> None:
        begun = sweep.begun_within(part, arguments.begun_within)
        options: dict[str, Any] = {"commit": _commit(), "loud": arguments.loud, "briefly": arguments.briefly}
        for verdict in sweep.sweep(begun, arguments.results, **options):
            print(report.line(verdict), flush=True)

    is_whole = sweep.in_parts(jobs, arguments.at_once, judge)
    judged = sweep.done(arguments.results)
    found = [judged[job.name] for job in jobs if job.name in judged]
    print(report.summary(found))
    lost = [
        verdict["job"]
        for verdict in found
        if verdict["column"] != RIGHT == expected.get(verdict["job"], {"column": ""})["column"]
    ]
    if lost:
        print(f"not right any more: {', '.join(lost)}")
    return int(bool(lost) or not is_whole or any(verdict["column"] in BAD for verdict in found))


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

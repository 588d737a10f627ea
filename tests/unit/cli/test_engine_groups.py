"""``--on`` several times: each has its own nodes and options, wherever they stand before the script."""

import pytest

from varuna.cli.cluster.engine_options import EngineNodes, engine_groups
from varuna.core.errors import UsageError


def groups(line: str) -> tuple[str, list[EngineNodes]]:
    kept, engines = engine_groups(line.split())
    return " ".join(kept), engines[1:]


def test_what_follows_an_engine_and_is_its_option_belongs_to_it() -> None:
    assert groups("--on aws:a --nodes 2:4 --run-dir r train.py --on x") == (
        "--on aws:a --nodes 2:4 --run-dir r train.py --on x",
        [],
    )
    first, more = groups(
        "--workers 8 --on slurm:a --time 1:00 --nodes 2 --on=slurm:b --nodes=1:4 --run-dir r --time 2:00 "
        "--on aws:c --price 3 --nodes 0:9 -- train.py --nodes 7"
    )
    assert first == "--workers 8 --on slurm:a --time 1:00 --nodes 2 --run-dir r --price 3 -- train.py --nodes 7"
    assert more == [EngineNodes("slurm:b", "1:4", {"time": "2:00"}), EngineNodes("aws:c", "0:9", {})]


def test_a_value_is_never_taken_for_an_option() -> None:
    kept, engines = engine_groups(["--on", "aws:a", "--nodes", "1", "--on", "slurm:b", "--sbatch", "--time=3", "t.py"])
    assert kept == ["--on", "aws:a", "--nodes", "1", "t.py"]
    assert engines[1].options == {"sbatch": "--time=3"}
    assert engine_groups(["--on"]) == (["--on"], [EngineNodes("", "", {})])


def test_an_option_of_another_engine_is_left_where_it_was_and_none_is_taken_twice() -> None:
    assert groups("--on aws:a --nodes 1 --on aws:b --nodes 2 --partition p t.py") == (
        "--on aws:a --nodes 1 --partition p t.py",
        [EngineNodes("aws:b", "2", {})],
    )
    for twice in ("--nodes 2 --nodes 3", "--nodes 2 --time 1 --time 2"):
        with pytest.raises(UsageError, match="is given twice"):
            groups(f"--on aws:a --nodes 1 --on slurm:b {twice} t.py")

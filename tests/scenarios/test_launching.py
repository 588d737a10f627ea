"""One script, three ways to start it, equal losses (DESIGN §4)."""

from pathlib import Path

import pytest

from tests.scenarios.launch import json_log, python, torchrun, varuna

pytestmark = pytest.mark.timeout(300)


def test_the_same_file_trains_the_same_in_every_way(tmp_path: Path) -> None:
    alone = python("--dropout", "0.1")
    assert alone.code == 0, alone.err
    assert len(alone.losses) == 20
    fixed = torchrun(4, "--dropout", "0.1", VARUNA_STAGES="2")
    assert fixed.code == 0, fixed.err
    elastic = varuna(4, ["--stages", "4", "--json-log", str(tmp_path / "log.jsonl")], "--dropout", "0.1")
    assert elastic.code == 0, elastic.err
    assert elastic.losses == alone.losses  # P = 4, D = 1: not a bit differs
    assert fixed.losses == pytest.approx(alone.losses, rel=1e-5)
    assert "2x2" in fixed.err
    log = json_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in log] == list(range(20))
    assert {line["step"]: line["loss"] for line in log} == alone.losses
    assert log[0]["plan"] == {"stages": 4, "replicas": 1, "micro_batch": 2, "micro_batches": 6}
    assert log[0].keys() == {"step", "loss", "generation", "plan", "examples_per_s", "wall_time"}


def test_all_ranks_leave_together_when_one_breaks() -> None:
    done = torchrun(2, "--break-at", "3", VARUNA_STAGES="2")
    assert done.code == 0, done.err
    assert sorted(done.losses) == [0, 1, 2, 3]
    assert done.err.count("after the loop") == 2


def test_an_export_has_the_models_names_and_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, start in (("one", python), ("two", lambda *args: torchrun(2, *args, VARUNA_STAGES="2"))):
        done = start("--steps", "3", "--export", str(tmp_path / name))
        assert done.code == 0, done.err
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert "embed.weight" in one
    assert "head.weight" not in one
    assert "blocks.3.up.weight" in one
    assert all(one[name].equal(two[name]) for name in one)

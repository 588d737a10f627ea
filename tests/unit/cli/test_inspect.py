"""``varuna inspect`` runs the same script and changes nothing."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from varuna.cli.main import app
from varuna.core.errors import NoPlanError, UsageError, WorkerError

JOB = str(Path(__file__).parents[2] / "scenarios" / "job.py")
TWO = ("--layers", "2")


def inspected(*args: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


def test_json_tells_cuts_stages_ties_and_errors() -> None:
    report = json.loads(inspected("--stages", "2", "--verify", "--json", JOB, *TWO, "--dropout", "0.1"))
    told = {"cut_points", "stages", "tied", "batch_dependent", "mixes", "eager", "verify", "dependencies"}
    assert report.keys() == told
    assert report["dependencies"] is None
    assert not report["mixes"]
    assert not report["batch_dependent"]
    assert len(report["stages"]) == 2
    assert report["tied"][0]["name"] == "embed.weight"
    assert report["verify"]["loss_error"] < 1e-6
    assert report["verify"]["gradient_error"] < 1e-6
    cut = report["cut_points"][0]
    assert cut["crosses"][0]["shape"] == ["B", 12, 16]
    assert cut["crosses"][0]["bytes_per_example"] == 12 * 16 * 4
    assert cut["bytes_per_example"] == sum(each["bytes_per_example"] for each in cut["crosses"])
    assert sum(stage["share"] for stage in report["stages"]) == pytest.approx(1.0)


@pytest.mark.nightly
def test_batch_normalisation_is_told_and_verified_in_training_mode() -> None:
    report = json.loads(inspected("--verify", "--json", JOB, *TWO, "--dropout", "0.1", "--batch-norm"))
    assert report["batch_dependent"]
    assert [each["operation"] for each in report["mixes"]] == ["aten::batch_norm"] * 2
    assert re.search(r"scenarios/job\.py:\d+ \(mixed = self\.norm\(x\)", report["mixes"][0]["where"])
    assert report["verify"]["loss_error"] < 1e-6
    assert report["verify"]["gradient_error"] < 1e-6
    assert "micro_batch=" in inspected(JOB, *TWO, "--batch-norm")


@pytest.mark.nightly
def test_what_mixes_examples_is_listed_with_its_place_and_verified(tmp_path: Path) -> None:
    script = tmp_path / "balanced.py"
    script.write_text(
        "import torch, varuna\n"
        "from tests.scenarios.job import Language, Sentences\n"
        "def balanced(output, batch):\n"
        "    share = torch.softmax(output[1].flatten()[:4] * batch['tokens'][:, :4].float(), -1).mean(0)\n"
        "    return output[0] + (share * share).sum()\n"
        "model = lambda: Language(2, 0.0)\n"
        "train = lambda named: torch.optim.SGD(named)\n"
        "varuna.Trainer(model, Sentences(False), train, 4, loss=balanced).steps(3).__next__()\n"
    )
    result = CliRunner().invoke(app, ["inspect", "--verify", "--json", str(script)])
    report = json.loads(result.stdout)
    found = [each["where"] for each in report["mixes"] if each["operation"] == "aten::mul" and each["certain"]]
    assert any("balanced.py:5 (return output[0] + (share * share).sum())" in each for each in found)
    assert "per_micro_batch=True" in report["verify"]["finding"]
    assert result.exit_code == 1
    shown = CliRunner().invoke(app, ["inspect", str(script)]).stdout
    assert re.search(
        r"mixes examples: aten::mul at .*balanced\.py:5 .*: multiplies sums or means over the batch", shown
    )


def test_a_wrong_capture_is_told_in_clean_json_with_code_1(tmp_path: Path) -> None:
    script = tmp_path / "hooked.py"
    script.write_text(
        "import torch, varuna\n"
        "from tests.scenarios.job import Language, Sentences\n"
        "print('the script prints')\n"
        "def build():\n"
        "    print('and so does the constructor')\n"
        "    model = Language(2, 0.0)\n"
        "    model.embed.weight.register_hook(lambda gradient: gradient * 2)\n"
        "    return model\n"
        "varuna.Trainer(build, Sentences(False), lambda named: torch.optim.SGD(named), 4).steps(3).__next__()\n"
    )
    result = CliRunner().invoke(app, ["inspect", "--verify", "--json", str(script)])
    assert result.exit_code == 1
    assert "register_hook on embed.weight" in json.loads(result.stdout)["verify"]["finding"]
    assert "and so does the constructor" in result.stderr
    assert "WRONG: the model has hooks" in CliRunner().invoke(app, ["inspect", "--verify", str(script)]).stdout
    assert json.loads(CliRunner().invoke(app, ["inspect", "--json", str(script)]).stdout)["verify"] is None


@pytest.mark.nightly
def test_trace_tells_what_crosses_stages_unseen(tmp_path: Path) -> None:
    script = tmp_path / "clips.py"
    script.write_text(
        "import torch, varuna\n"
        "from tests.scenarios.job import Language, Sentences\n"
        "def clip(named):\n"
        "    torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)\n"
        "def adamw(named):\n"
        "    return torch.optim.AdamW([p for _, p in named])\n"
        "varuna.Trainer(lambda: Language(2, 0.0), Sentences(False), adamw, 4, before_step=clip).steps(3).__next__()\n"
    )
    (found,) = json.loads(inspected("--trace", "--json", str(script)))["dependencies"]
    assert found.keys() == {"kind", "sections", "names", "where", "operation", "remedy"}
    assert found["where"] == f"{script}:4"
    assert "embed.weight" in found["names"]
    text = inspected("--trace", str(script))
    assert f"where: {script}:4" in text
    assert "what to do: " in text
    assert "clip_grad_norm=" in text


@pytest.mark.nightly
def test_trace_is_silent_on_a_sound_job() -> None:
    assert json.loads(inspected("--trace", "--json", JOB, *TWO, "--dropout", "0.1"))["dependencies"] == []
    assert "none found" in inspected("--trace", JOB, *TWO, "--normed")


def test_the_table_fits_a_terminal_and_names_the_modules() -> None:
    text = inspected("--stages", "2", JOB, *TWO)
    assert "blocks." in text
    assert "f32[B, 12," in text
    assert "tied: embed.weight" in text


@pytest.mark.nightly
def test_stages_are_those_that_varuna_plan_finds() -> None:
    report = json.loads(inspected("--stages", "2", "--json", JOB, *TWO))
    planned = CliRunner().invoke(app, ["plan", "--gpus", "2", "--stages", "2", "--json", JOB, "--", *TWO])
    assert [stage["sections"][0] for stage in report["stages"]] == json.loads(planned.stdout)["plans"][0]["starts"]


@pytest.mark.nightly
def test_too_many_stages_are_refused_with_the_number() -> None:
    with pytest.raises(NoPlanError, match=r"P=99 was requested, but the model has .* or lower --stages"):
        inspected("--stages", "99", JOB, *TWO)


def test_a_script_that_fails_or_never_trains_is_told_apart(tmp_path: Path) -> None:
    broken, idle = tmp_path / "broken.py", tmp_path / "idle.py"
    broken.write_text("raise ValueError('mine')\n")
    idle.write_text("print('nothing to do')\n")
    with pytest.raises(WorkerError, match="mine"):
        inspected(str(broken))
    with pytest.raises(UsageError, match="without calling"):
        inspected(str(idle))
    with pytest.raises(UsageError, match="no script"):
        inspected(str(tmp_path / "absent.py"))

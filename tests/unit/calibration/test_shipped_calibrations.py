from pathlib import Path

import pytest

from varuna.calibration.file import read_calibration, write_calibration

FOLDER = Path(__file__).parents[3] / "examples" / "calibrations"
FILES = sorted(FOLDER.glob("*.json"))


def test_the_settings_of_the_paper_and_one_of_today_are_shipped() -> None:
    names = {file.stem for file in FILES}
    assert names >= {f"gpt2-{size}-v100" for size in ("2.5b", "8.3b", "20b", "200b")}
    assert names >= {"gpt2-8.3b-h100", "gpt2-200b-h100", "llama3-405b-h100"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_calibration_is_small_says_where_it_comes_from_and_is_written_as_it_is_read(
    file: Path, tmp_path: Path
) -> None:
    known = read_calibration(file)
    assert known.first.notes
    write_calibration(known, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == file.read_text()
    assert len(file.read_text()) < 5_000


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-2.5b-v100", 2.5),
        ("gpt2-8.3b-v100", 8.3),
        ("gpt2-20b-v100", 20),
        ("gpt2-200b-v100", 200),
        ("gpt2-200b-h100", 200),
        ("llama3-405b-h100", 405),
        ("llama3.1-70b-lora-4090", 70.6),
        ("qwen3-235b-a22b-lora-4090", 235),
    ],
)
def test_a_model_has_the_parameters_of_its_name(name: str, billions: float) -> None:
    calibration = read_calibration(FOLDER / f"{name}.json").first
    total_bytes = sum(calibration.kinds[kind].parameter_bytes for kind in calibration.kind_names)
    tied_bytes = sum(tied.size_bytes for tied in calibration.tied)
    assert (total_bytes - tied_bytes) / 2 == pytest.approx(billions * 1e9, rel=0.035)

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from varuna.calibration.file import check_matches, read_calibration, write_calibration
from varuna.calibration.format import Calibrations, SectionKind
from varuna.calibration.nominal import nominal_calibration
from varuna.core.errors import UsageError
from varuna.core.model import ModelFacts, SectionFacts, TiedParameter

LAYER = {
    "micro_batches": [1, 4],
    "forward_s": [0.01, 0.03],
    "backward_s": [0.02, 0.06],
    "activation_bytes": 50_000_000,
    "boundary_bytes": 4_000_000,
    "parameter_bytes": 88e6,
    "trainable_bytes": 88e6,
    "optimizer_bytes": 528e6,
}
OF_ONE_CLASS: dict[str, Any] = {
    "hardware": {"name": "V100-16GB, 10 Gb/s", "memory_bytes": 16.9e9},
    "model": {"name": "by hand"},
    "kinds": {"layer": LAYER},
    "sections": [{"kinds": ["layer"], "count": 54}],
    "across_vms": {
        "link": {"latency_s": 0.0003, "bytes_per_s": 1.1e9},
        "rings": [{"latency_s": 0.0003, "bytes_per_s": 0.47e9}],
    },
}


HAND_WRITTEN: dict[str, Any] = {"classes": {"": OF_ONE_CLASS}}


def changed(path: str, value: object) -> dict[str, Any]:
    """The file with another value; of the class, unless the path begins with a slash."""
    content: dict[str, Any] = json.loads(json.dumps(HAND_WRITTEN))
    *parents, last = path.removeprefix("/").split("/")
    place: Any = content if path.startswith("/") else content["classes"][""]
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[int(last) if isinstance(place, list) else last] = value
    return content


def refusal(folder: Path, content: object) -> str:
    path = folder / "calibration.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError) as caught:
        read_calibration(path)
    return str(caught.value)


def test_a_file_written_by_hand_is_short_and_comes_back_as_it_was(tmp_path: Path) -> None:
    first = tmp_path / "by-hand.json"
    first.write_text(json.dumps(HAND_WRITTEN))
    calibration = read_calibration(first)
    assert calibration.first.section_count == 54
    write_calibration(calibration, tmp_path / "again.json")
    assert read_calibration(tmp_path / "again.json") == calibration
    assert len((tmp_path / "again.json").read_text().splitlines()) < 40


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("/surprise", 1, "surprise: Extra inputs are not permitted"),
        ("kinds/layer/color", "red", "kinds.layer.color: Extra inputs are not permitted"),
        ("kinds/layer/forward_s", [0.01, -0.03], "kinds.layer.forward_s.1: Input should be greater than or equal to 0"),
        ("kinds/layer/forward_s", [0.01, float("nan")], "kinds.layer.forward_s.1: Input should be a finite number"),
        ("kinds/layer/forward_s", [0.01, float("inf")], "kinds.layer.forward_s.1: Input should be a finite number"),
        ("kinds/layer/forward_s", [0.01], "forward_s has 1 times for 2 micro_batches"),
        ("kinds/layer/input_s", [0.01, 0.03], "input_s and weight_s are halves of B: give both, or none"),
        ("kinds/layer/micro_batches", [4, 1], "micro_batches [4, 1] must ascend"),
        ("kinds/layer/micro_batches", [4, 4], "micro_batches [4, 4] must ascend"),
        ("kinds/layer/micro_batches", [0, 1], "greater than or equal to 1"),
        ("kinds/layer/parameter_bytes", -1, "greater than or equal to 0"),
        ("kinds/layer/parameter_bytes", 0.5, "valid integer"),
        ("sections/0/kinds", ["layer", "head"], "name the kind 'head', which is not one of the kinds ['layer']"),
        ("sections/0/count", 10**12, "less than or equal to 100000"),
        ("sections", [], "sections: Tuple should have at least 1 item"),
        ("kinds/other", LAYER, "kind 'other' is used by no section"),
        ("tied", [{"name": "wte", "sections": [0, 54], "size_bytes": 1}], "be within 0 to 53"),
        ("tied", [{"name": "wte", "sections": [3, 3], "size_bytes": 1}], "must ascend"),
        ("hardware/memory_bytes", 0, "greater than 0"),
        ("across_vms/link/bytes_per_s", 0, "greater than 0"),
        ("across_vms/link/jitter", {"quantiles_s": [3, 1]}, "at least two numbers that ascend"),
        ("across_vms/rings", [], "at least 1 item"),
        ("across_vms/rings", OF_ONE_CLASS["across_vms"]["rings"] * 2, "rings must differ in in_flight or ranks"),
        ("/version", 1, "of version 1, but this Varuna reads version 2"),
        ("/format", "other", "not a calibration"),
        ("hardware", None, "hardware: Input should be"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, path: str, value: object, words: str) -> None:
    assert words in refusal(tmp_path, changed(path, value))


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    content = changed("model", {"name": "x"})
    del content["classes"][""]["across_vms"]
    assert "across_vms: Field required" in refusal(tmp_path, content)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"a": 1, "a": 2}', "[" * 100_000])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text)


def test_a_file_that_is_not_there_or_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "bytes"):
        with pytest.raises(UsageError, match="cannot read a calibration"):
            read_calibration(path)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)
PATHS = st.sampled_from(
    [*OF_ONE_CLASS, *(f"kinds/layer/{name}" for name in LAYER), "hardware/name", "across_vms/link", "sections/0"]
)


@given(path=PATHS, value=VALUES)
@settings(max_examples=by_depth(13, 80), deadline=None)
def test_whatever_stands_in_a_file_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, path: str, value: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.json"
    file.write_text(json.dumps(changed(path, value)))
    with suppress(UsageError):
        assert read_calibration(file).first.section_count == 54


def test_times_are_interpolated_between_sizes_and_scale_beyond_them() -> None:
    kind = SectionKind.model_validate(
        {**LAYER, "micro_batches": [2, 4, 8], "forward_s": [3, 5, 8], "backward_s": [1] * 3}
    )
    times = [kind.at(kind.forward_s, m) for m in (1, 2, 3, 4, 6, 8, 16)]
    assert times == [2, 3, 4, 5, 6.5, 8, 16]
    steep = kind.model_copy(update={"forward_s": (1.0, 9.0, 18.0)})
    assert steep.at(steep.forward_s, 1) == 0.5


FACTS = ModelFacts(
    digest="abc",
    sections=tuple(
        SectionFacts(
            label=f"h.{i}",
            forward_s=0.5,
            parameter_bytes=10,
            trainable_bytes=10,
            optimizer_bytes=20,
            activation_bytes=5,
            boundary_bytes=boundary,
        )
        for i, boundary in enumerate((2, 2, 0))
    ),
    tied=(TiedParameter(name="wte", sections=(0, 2), size_bytes=4),),
)


def test_facts_become_a_calibration_in_which_equal_sections_are_one_kind() -> None:
    calibration = nominal_calibration(FACTS)
    assert [run.count for run in calibration.sections] == [2, 1]
    assert len(calibration.kinds) == 2
    assert calibration.tied == FACTS.tied
    kind = calibration.kinds[calibration.sections[0].kinds[0]]
    assert kind.at(kind.backward_s, 3) == 3.0
    assert kind.at(kind.input_s, 3) + kind.at(kind.weight_s, 3) == pytest.approx(3.0)
    check_matches(Calibrations.of_one(calibration), FACTS)


def test_another_model_is_refused() -> None:
    calibration = nominal_calibration(FACTS)
    with pytest.raises(UsageError, match="its graph, sections or parameters differ"):
        check_matches(Calibrations.of_one(calibration), FACTS.model_copy(update={"digest": "def"}))
    by_hand = Calibrations.model_validate(HAND_WRITTEN)
    with pytest.raises(UsageError, match="has 54 sections, but this job's model has 3"):
        check_matches(by_hand, FACTS)

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from varuna.cli.main import main

FOLDER = Path(__file__).parents[4] / "examples" / "calibrations"
FAST, SLOW = "gpt2-2.5b-h100.json", "gpt2-2.5b-v100.json"


def entry(name: str = "fast", calibration: str = FAST, most: object = 2, **rest: object) -> str:
    given = {"name": name, "calibration": calibration, "most": most, **rest}
    return "[[offers]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    for name in (FAST, SLOW, "gpt2-8.3b-v100.json"):
        shutil.copy(FOLDER / name, tmp_path / name)
    bare = json.loads((FOLDER / SLOW).read_text())
    del bare["classes"][""]["hardware"]["price_per_hour"]
    (tmp_path / "bare.json").write_text(json.dumps(bare))

    def run(text: str, *args: str) -> tuple[int, str, str]:
        (tmp_path / "offers.toml").write_text(text)
        monkeypatch.setattr(sys, "argv", ["varuna", "offers", str(tmp_path / "offers.toml"), *args])
        try:
            code = main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, " ".join(captured.err.split())

    return run


@pytest.mark.nightly
def test_the_frontier_and_what_answers_the_question(offers: Any) -> None:
    text = entry() + entry("slow", SLOW, 8, losses_per_hour=0.1)
    code, out, _ = offers(text, "--examples", "1e7", "--deadline", "70", "--budget", "400", "--json")
    assert code == 0
    found = json.loads(out)
    rows = found["frontier"]
    in_time = [at for at, row in enumerate(rows) if row["hours"] <= 70]
    paid = [at for at, row in enumerate(rows) if row["dollars"] <= 400]
    assert found["cheapest_in_time"] == in_time[0]
    assert found["fastest_for_budget"] == paid[-1]
    assert rows[-1]["gpus"] == {"fast": 2, "slow": 8}
    for row in rows:
        assert row["dollars"] == pytest.approx(row["hours"] * row["dollars_per_hour"])
        assert row["hours"] == pytest.approx(1e7 / row["examples_per_s"] / 3600)
    shown = offers(text, "--examples", "1e7", "--deadline", "70", "--budget", "1")[1]
    assert "d: the cheapest that is done within 70 hours" in shown
    assert "none costs at most $ 1: the cheapest takes $ 2" in shown
    assert "2 fast + 8 slow" in shown


@pytest.mark.nightly
def test_the_frontier_as_a_picture(offers: Any, tmp_path: Path) -> None:
    drawn = tmp_path / "frontier.svg"
    text = entry() + entry("slow", SLOW, 8)
    code, out, _ = offers(text, "--examples", "1e7", "--deadline", "70", "--budget", "400", "--svg", str(drawn))
    assert code == 0
    assert "d: the cheapest that is done within 70 hours" in out
    svg = drawn.read_text()
    assert "2 fast + 8 slow" in svg
    assert "the cheapest in time" in svg
    assert "10,000,000 examples" in svg
    code, _, err = offers(text, "--svg", str(tmp_path / "missing" / "frontier.svg"))
    assert code
    assert "frontier.svg" in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a list of [[offers]]"),
        ("offers = 3", "must be a list of [[offers]]"),
        ("x = ", "is not TOML"),
        (entry() + "[other]\n", "must be a list of [[offers]] and nothing else"),
        (entry(most=0), "offer 1: most: Input should be greater than or equal to 1"),
        (entry(most="many"), "offer 1: most: Input should be a valid integer"),
        (entry(price_per_hour=-1), "offer 1: price_per_hour"),
        (entry(colour="red"), "offer 1: colour: Extra inputs are not permitted"),
        ("[[offers]]\nname = 'x'\nmost = 1\n", "offer 1: calibration: Field required"),
        (entry() + entry(), "two offers have one name: fast, fast"),
        (entry() * 7, "has 7 offers. Give at most 6"),
        (entry(calibration="none.json"), "cannot read a calibration from"),
        (entry(calibration="bare.json"), "offer 'fast' has no price"),
        (entry() + entry("b", "gpt2-8.3b-v100.json"), "offer 'b': Value error, device class"),
        (entry("a", SLOW) + entry("b", "bare.json"), "two calibrations are of 'V100-16GB, 10 Gb/s'"),
        (entry(most=2, gpus_per_vm=4), "at most 2 GPUs can be had, but a VM has 4"),
    ],
)
def test_offers_that_cannot_be_are_refused_by_name(offers: Any, text: str, words: str) -> None:
    code, _, said = offers(text)
    assert code == 2
    assert words in said


def test_a_deadline_needs_a_length_and_a_model_a_fleet(offers: Any) -> None:
    assert "Give --examples" in offers(entry(), "--deadline", "3")[2]
    code, _, said = offers(entry("a", "gpt2-8.3b-v100.json", 2))
    assert code == 3
    assert "fits on no fleet of these offers" in said


@pytest.mark.nightly
def test_what_leaves_a_region_is_paid_for(offers: Any) -> None:
    near = {"region": "east", "egress_per_gb": 0.05}
    both = entry("a", SLOW, 12, **near) + entry("b", SLOW, 12, region="west", egress_per_gb=0.05)
    rows = json.loads(offers(both, "--json")[1])["frontier"]
    for row in rows:
        is_apart = len(row["gpus"]) == 2
        assert (row["egress_dollars_per_hour"] > 0) == is_apart
        assert row["dollars_per_hour"] > row["egress_dollars_per_hour"]
    assert rows[-1]["gpus"] == {"a": 12, "b": 12}
    assert "egress" in offers(both)[1]
    one = entry("a", SLOW, 12, **near) + entry("b", SLOW, 12, **near)
    assert "egress" not in offers(one)[1]


@pytest.mark.nightly
def test_what_leaves_a_zone_is_paid_for_at_its_own_price(offers: Any) -> None:
    """Two zones of one region: pipelines stay in one, sums go across."""
    east = {"region": "east", "egress_per_gb": 0.05, "zone_egress_per_gb": 0.02}
    both = entry("a", SLOW, 12, zone="a", **east) + entry("b", SLOW, 12, zone="b", **east)
    rows = json.loads(offers(both, "--json")[1])["frontier"]
    assert rows[-1]["gpus"] == {"a": 12, "b": 12}
    assert all((row["egress_dollars_per_hour"] > 0) == (len(row["gpus"]) == 2) for row in rows)
    same = entry("a", SLOW, 12, zone="a", **east) + entry("b", SLOW, 12, zone="a", **east)
    assert "egress" not in offers(same)[1]


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ({"zone_egress_per_gb": 0.1}, {}, "has zone_egress_per_gb, but no zone. Add zone."),
        ({"zone": "a"}, {}, "offer 'a' has a zone, and 'b' has none. Give all or none."),
        (
            {"zone": "a", "zone_egress_per_gb": 0.1},
            {"zone": "a", "zone_egress_per_gb": 0.2},
            "a GB that leaves a costs 0.2 here and 0.1 in another",
        ),
        ({"egress_per_gb": 0.1}, {}, "has egress_per_gb, but no region. Add region."),
        ({"region": "a"}, {}, "offer 'a' has a region, and 'b' has none. Give all or none."),
        ({"region": "a", "egress_per_gb": 0.1}, {"region": "a", "egress_per_gb": 0.2}, "0.2 here and 0.1 in another"),
        ({"region": "a b"}, {}, "offer 1: region: String should match pattern"),
        ({"region": "a", "egress_per_gb": -1}, {}, "offer 1: egress_per_gb: Input should be greater"),
    ],
)
def test_regions_that_make_no_sense_are_refused(
    offers: Any, first: dict[str, object], second: dict[str, object], complaint: str
) -> None:
    code, _, err = offers(entry("a", SLOW, **first) + entry("b", SLOW, **second))
    assert code == 2
    assert complaint in err

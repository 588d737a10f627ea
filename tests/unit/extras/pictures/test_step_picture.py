import xml.etree.ElementTree as ET

import pytest

from tests.unit.extras.pictures.timelines import a_step
from varuna.core.errors import FleetError
from varuna.core.times import Interval
from varuna.extras.pictures.step_picture import picture, simulation_of

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_simulated_step_of_steady_ranks_is_the_measured_one() -> None:
    step = a_step((0.0, 0.0, 0.0, 0.0))
    trace = simulation_of(step)
    for rank in step.ranks[:2]:
        row = [Interval(a.kind.value, a.micro_batch, begin_s, end_s) for a, begin_s, end_s in trace.rows[rank.rank]]
        assert row == list(rank.actions)
    assert trace.step_s == 21.0


def test_a_sheet_has_measured_replicas_above_the_simulation_on_one_axis() -> None:
    step = a_step((0.0, 5.0, 0.0, 5.0))
    texts = texts_of(picture(step, simulation_of(step)))
    titles = [text for text in texts if text.startswith(("Replica", "Simulated"))]
    assert [title.split(",")[0].split("every")[0] for title in titles] == ["Replica 0", "Replica 1", "Simulated"]
    assert texts.count("stage 0") == 3
    assert texts.count("21 s") == 3  # the clocks' five seconds are taken out
    assert any("aligned by the messages of this step, to within ±" in text for text in texts)


def test_a_rank_that_is_gone_leaves_its_row_empty_and_is_named() -> None:
    step = a_step((0.0, 0.0, 0.0, 0.0), missing=2)
    assert "Rank 2 is missing: worker w9: killed by SIGKILL." in texts_of(picture(step, simulation_of(step)))


def test_a_stage_without_any_rank_cannot_be_simulated() -> None:
    step = a_step((0.0, 0.0), missing=1)
    with pytest.raises(FleetError, match="no rank of stage 1 has told what it did"):
        simulation_of(step)

"""Unmodified models of many families: captured, cut by themselves, and equal to the unsplit model."""

import logging
import os

import pytest

from tests.unit.engine.ranks import single_threaded
from tests.unit.partition.families import NAMED
from tests.unit.partition.in_turn import differences
from tests.unit.partition.more_families import MORE

FAMILIES = {**NAMED, **(MORE if os.environ.get("VARUNA_ALL_FAMILIES") else {})}
"""``VARUNA_ALL_FAMILIES=1`` adds as many again."""


@pytest.fixture(autouse=True)
def _no_traces_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export writes thousands of debug records, which pytest would collect: half of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # caches that forward() assigns, as plain attributes
@pytest.mark.parametrize("name", FAMILIES)
def test_sections_in_turn_equal_the_unsplit_model(name: str) -> None:
    family = FAMILIES[name]
    with single_threaded():
        model, found = differences(family, batch_sizes=(2, 5, 3) if family.buffers else (2, 1, 5))
    assert found == []
    assert len(model.sections) >= 2
    tied = {tied.name for tied in model.facts.tied}
    assert set(family.tied) <= tied
    assert any(section.updates for section in model.sections) == family.buffers

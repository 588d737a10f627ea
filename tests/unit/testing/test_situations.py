"""Situations of public scripts come out as docs/scripts.md says: as in a plain loop, or refused with a way out."""

import re
from pathlib import Path

import pytest

from tests.depth import nightly
from tests.unit.testing.situations import (
    SITUATIONS,
    OverVaruna,
    PlainLoop,
    Script,
    Situation,
    Way,
    layers_dropped_by_torch,
)
from varuna.core.errors import VarunaError
from varuna.testing import fail_at, run

ROOT = Path(__file__).parents[3]
RIGHT = [each for each in SITUATIONS if not each.refused]
REFUSED = [each for each in SITUATIONS if each.refused]
FAST = {
    *(
        "optimizer_state_cleared",
        "best_model_kept_by_deepcopy",
        "gradients_watched_by_hooks",
        "rolled_back_in_the_loop",
    ),
    *("layers_dropped_by_numpy", "lazy_layers", "weighted_sampler_in_a_loader", "two_passes"),
    *("weight_decay_follows_a_cosine", "layers_unfrozen_in_the_loop", "gradients_replaced_before_the_update"),
    *(
        "centre_in_a_loss_that_trains",
        "centre_in_the_loss",
        "epoch_of_the_dataset_set_in_the_loop",
        "hook_of_the_optimizer_anneals_the_loss",
        "level_in_a_file",
        "loss_of_one_number_of_the_step",
        "optimizer_that_goes_on",
        "rate_of_what_forward_keeps",
    ),
}
"""one of each way to be found out"""
DRAWS = {layers_dropped_by_torch}
"""They draw in another order than a plain loop, so only plans are compared."""


def named(situations: list[Situation]) -> list[object]:
    return [
        pytest.param(each, id=each.script.__name__, marks=() if each.script.__name__ in FAST else pytest.mark.nightly)
        for each in situations
    ]


def losses(script: Script, way: Way) -> list[float]:
    script(way)
    return way.losses


@pytest.mark.parametrize("situation", named(RIGHT))
def test_what_works_trains_as_a_plain_loop(situation: Situation) -> None:
    assert losses(situation.script, OverVaruna()) == pytest.approx(losses(situation.script, PlainLoop()), rel=1e-5)


@pytest.mark.parametrize("situation", named(REFUSED))
def test_what_is_refused_is_told_in_words_and_its_way_out_is_right(situation: Situation) -> None:
    with pytest.raises(VarunaError, match=f"(?s){situation.refused}"):
        losses(situation.script, OverVaruna())
    if not situation.fails_plainly:
        losses(situation.script, PlainLoop())
    if situation.instead is not None and situation.instead not in DRAWS:
        expected = losses(situation.instead, PlainLoop())
        assert losses(situation.instead, OverVaruna()) == pytest.approx(expected, rel=1e-5)


WORKS = {each.script.__name__: each.script for each in RIGHT} | {
    each.instead.__name__: each.instead for each in REFUSED if each.instead is not None
}


@pytest.mark.parametrize("name", nightly(*WORKS))
def test_three_stages_of_which_one_dies_train_the_same(name: str) -> None:
    alone = OverVaruna()
    WORKS[name](alone)
    outcome = run(lambda: WORKS[name](OverVaruna()), workers=3, stages={3: 3, 2: 2}, faults=[fail_at(rank=1, step=2)])
    assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)


def test_the_page_lists_each_of_them() -> None:
    page = (ROOT / "docs" / "scripts.md").read_text()
    lists = re.findall(r"^\*\*Works as it is:\*\* (.+?)\.\n\n", page, re.M | re.S)
    said = {
        *re.findall(r"^- \*\*(.+?):\*\* ", page, re.M),
        *(item for each in lists for item in " ".join(each.split()).split("; ")),
    }
    missing = [each.title for each in SITUATIONS if each.title not in said]
    assert not missing, f"say in docs/scripts.md what becomes of {missing}"

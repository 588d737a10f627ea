"""Samples take the forms that a configuration speaks of."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from tests.field.forms import candidates
from tests.field.samples import Shapes
from tests.field.targets import sample


def shapes(kind: str, takes: str, variant: str = "", **config: Any) -> Shapes:
    return Shapes(SimpleNamespace(**config), frozenset(takes.split()), kind, 16, True, variant)


def test_a_place_may_hold_several_codes_of_sound() -> None:
    drawn = sample(shapes("tokens", "input_ids", "codes too", num_codebooks=4, codebook_vocab_size=50), 0)
    assert drawn["input_ids"].shape == (16, 5)
    assert drawn["labels"].shape == (16,)
    assert int(drawn["input_ids"].max()) < 50


def test_codes_are_tried_only_where_the_configuration_has_codebooks() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Any, labels: Any) -> None: ...

    def variants(**config: Any) -> set[str]:
        found: Any = candidates(Model, Model, SimpleNamespace(**config), "tokens", even=True)
        return {each.variant for each in found}

    assert not {"codes", "rows of codes", "text only, typed", "several"} & variants()
    assert {"codes", "codes too"} <= variants(num_codebooks=4)


def test_names_of_things_lie_between_full_stops_of_the_vocabulary() -> None:
    drawn = sample(shapes("boxes", "pixel_values input_ids", vocab_size=2000, image_size=32), 0)
    assert drawn["input_ids"][0] == 101
    assert drawn["input_ids"][-1] == 102
    assert (drawn["input_ids"] == 1012).sum() == 6


def test_a_question_stands_where_it_is_asked_for() -> None:
    drawn = sample(shapes("pretraining", "input_ids question_positions", question_token_id=7), 0)
    assert drawn["input_ids"][drawn["question_positions"]] == 7
    assert drawn["start_positions"].shape == (1,)


def test_each_codebook_may_have_a_row_of_its_own() -> None:
    drawn = sample(shapes("tokens", "input_ids", "rows of codes", num_codebooks=4), 0)
    assert (drawn["input_ids"].shape, drawn["labels"].shape) == ((4, 16), (16, 4))


def test_a_second_reader_and_a_task_have_words_of_their_own() -> None:
    assert "qformer_input_ids" in sample(shapes("tokens", "input_ids qformer_input_ids"), 0)
    drawn = sample(shapes("masks", "pixel_values mask_labels task_inputs", task_seq_len=7, image_size=32), 0)
    assert drawn["task_inputs"].shape == (7,)

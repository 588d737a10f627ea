"""Open sizes are found in batches of several numbers of samples, and nests are the same flat and back."""

import pytest
import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.data.nest import nested, root, spread
from varuna.data.samples import SampleSource
from varuna.data.sizes import SAMPLES, OpenSizes, equal_sizes, lists_in, open_sizes, samples_in, told_apart


def packed(*lengths: int) -> dict[str, Tensor]:
    ids = torch.ones(1, sum(lengths))
    return {"ids": ids, "labels": ids, "of": torch.ones(len(lengths), 2), SAMPLES: torch.tensor(len(lengths))}


def test_dimensions_that_always_change_together_are_one_size() -> None:
    found = open_sizes([(1, packed(3)), (2, packed(2, 5)), (3, packed(1, 1, 4))])
    assert found == OpenSizes(((("ids", 1), ("labels", 1)), (("of", 0),)), (2.0, 1.0))
    assert found.of(packed(2, 2)) == (4, 2)
    assert found.keys == ("ids", "of")


def test_rows_are_no_open_size_also_where_samples_are_left_out() -> None:
    rows = [(2, {"x": torch.ones(2, 3)}), (3, {"x": torch.ones(2, 3)})]
    rows[1][1][SAMPLES] = torch.tensor(2)
    assert open_sizes(rows) is None


def test_sizes_that_were_equal_must_stay_so() -> None:
    found = open_sizes([(1, packed(3)), (2, packed(2, 5))])
    assert found is not None
    with pytest.raises(
        DataError, match=r"dataset indices \[7\], dimension 1 of 'ids' is 4, dimension 1 of 'labels' is 3"
    ):
        found.of({**packed(4), "labels": torch.ones(1, 3)}, [7])


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": torch.ones(1, 3)}, "same shapes whatever the number of samples"),
        ({"x": torch.ones(1, 3), "y": torch.ones(1)}, "another form for other samples: 'y' is missing"),
        ({"x": torch.ones(3)}, "'x' is torch.float32 with 2 dimensions, then torch.float32 with 1"),
    ],
)
def test_batches_without_one_form_are_refused(second: dict[str, Tensor], message: str) -> None:
    first = {"x": torch.ones(1, 3), SAMPLES: torch.tensor(2)}
    with pytest.raises(DataError, match=message):
        open_sizes([(2, first), (4, {**second, SAMPLES: torch.tensor(4)})])


def test_a_graph_is_captured_for_sizes_that_can_be_told_apart() -> None:
    sizes = open_sizes([(1, packed(3)), (2, packed(2, 5))])
    assert sizes is not None
    assert equal_sizes(packed(3, 4), sizes) == 1  # two samples, and two columns of ``of``
    apart = told_apart(packed(1), sizes)
    assert equal_sizes(apart, sizes) == 0
    assert apart["ids"].shape == apart["labels"].shape


def boxes(*counts: int) -> dict[str, Tensor]:
    """Boxes and labels of each sample, two views of all, and one number for each sample."""
    made: dict[str, Tensor] = {
        "scale": torch.ones(len(counts)),
        "views[0]": torch.ones(3, 6),
        "views[1]": torch.ones(2),
    }
    for number, count in enumerate(counts):
        made[f"targets[{number}]['boxes']"] = torch.ones(count, 4)
        made[f"targets[{number}]['labels']"] = torch.ones(count)
    return {**made, SAMPLES: torch.tensor(len(counts))}


def test_lists_with_an_entry_for_each_sample_are_told_from_others() -> None:
    seen = [(len(counts), boxes(*counts)) for counts in ((1,), (1, 1), (2, 1, 1))]
    assert lists_in(seen) == {"targets[]['boxes']", "targets[]['labels']"}


def test_what_differs_at_one_place_of_a_list_is_open_at_all() -> None:
    seen = [(2, boxes(1, 2)), (2, boxes(3, 2))]  # by chance, the second samples are alike
    found = open_sizes(seen, lists=lists_in([(1, boxes(1)), *seen]))
    places = [tuple((f"targets[{number}]['{name}']", 0) for name in ("boxes", "labels")) for number in range(2)]
    assert found == OpenSizes(tuple(places), (1.5, 1.5), samples=2)


def test_entries_that_are_padded_to_the_longest_of_their_batch_have_one_size() -> None:
    seen = [(2, boxes(1, 1)), (2, boxes(3, 3))]
    found = open_sizes(seen, lists=lists_in([(1, boxes(1)), *seen]))
    assert found is not None
    assert [len(places) for places in found.places] == [4]


def test_a_nest_is_the_same_flat_and_back() -> None:
    nest = {"a": {"it's": 1, "b": [2, {"c": 3}]}, "d": 4}
    flat = spread(nest, lambda value: not isinstance(value, dict | list))
    assert list(flat) == ["a['it\\'s']", "a['b'][0]", "a['b'][1]['c']", "d"]
    assert nested(flat) == nest
    assert [*map(root, flat)] == ["a", "a", "a", "d"]


def test_a_micro_batch_without_samples_has_another_ones_tensors_and_counts_nothing() -> None:
    rows = [None if index % 3 else {"x": torch.tensor(float(index))} for index in range(9)]

    def there(samples: list[dict[str, Tensor] | None]) -> dict[str, Tensor]:
        return {"x": torch.stack([sample["x"] for sample in samples if sample is not None])}

    source = SampleSource(rows, seed=0, collate=there, shuffles=False)
    batch = source.micro_batch([1, 2])
    assert batch.tensors["x"].tolist() == [3.0]
    assert (samples_in(batch.tensors), batch.indices, len(batch.digests)) == (0, (1, 2), 2)
    assert samples_in(source.micro_batch([2, 3]).tensors) == 1


def test_samples_that_are_all_missing_are_refused() -> None:
    source = SampleSource([None] * 4, seed=0, collate=lambda samples: {"x": torch.ones(len(samples))})
    with pytest.raises(DataError, match=r"samples are None\. Check the data"):
        source.micro_batch([0])

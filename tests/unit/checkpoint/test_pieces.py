"""A section is divided into equal parts, and nothing is lost or doubled."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from varuna.checkpoint.pieces import TensorFacts, count_parts, divide, understudy_of, writer_of
from varuna.core.saved import ITEM_BYTES

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.tuples(st.sampled_from(list(ITEM_BYTES)), shapes))


@given(tensors.map(lambda found: [TensorFacts(name, *facts) for name, facts in found.items()]), st.integers(1, 6))
def test_every_element_is_in_one_part_aligned_and_parts_are_equal(found: list[TensorFacts], parts: int) -> None:
    divided = divide(found, parts)
    assert len(divided) == parts
    covered: dict[str, int] = {}
    sizes = []
    for pieces in divided:
        end = 0
        for piece in pieces:
            assert piece.offset == end
            assert piece.offset % ITEM_BYTES[piece.dtype] == 0
            assert piece.first == covered.get(piece.name, 0)
            covered[piece.name] = piece.first + piece.count
            end += piece.size_bytes
        sizes.append(end)
    assert covered == {tensor.name: prod(tensor.shape) for tensor in found}
    assert max(sizes) - min(sizes) <= 16


def test_all_holders_divide_alike_whatever_the_order() -> None:
    found = [TensorFacts("b", "F32", (9,)), TensorFacts("a", "F32", (2, 2)), TensorFacts("s", "I64", ())]
    assert divide(found, 3) == divide(found[::-1], 3)
    assert [[f"{p.name}[{p.first}+{p.count}]" for p in part] for part in divide(found, 3)] == [
        ["s[0+1]", "a[0+3]"],
        ["a[3+1]", "b[0+4]"],
        ["b[4+5]"],
    ]


def test_small_sections_are_not_divided() -> None:
    assert [count_parts(size, 4, 100) for size in (0, 1, 100, 101, 350, 10_000)] == [1, 1, 1, 2, 4, 4]


def test_writers_are_spread_and_an_understudy_is_another_replica() -> None:
    every = range(3)
    assert [[writer_of(section, part, every) for part in every] for section in (0, 1)] == [[0, 1, 2], [1, 2, 0]]
    assert all(writer_of(s, p, every) != understudy_of(s, p, every) for s in range(4) for p in every)
    assert writer_of(5, 0, range(1)) == understudy_of(5, 0, range(1)) == 0
    assert [(writer_of(0, part, (1, 3)), understudy_of(0, part, (1, 3))) for part in range(2)] == [(1, 3), (3, 1)]

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from varuna.fleet.state.persistent import PersistentMap

# Few different hashes: keys whose hashes agree in many bits, or altogether, must be told apart too.
KEYS = [f"k{number}" for number in range(200)]


class Colliding(str):
    """A text of which many have the same hash."""

    __slots__ = ()

    def __hash__(self) -> int:
        return len(self) << 40


@settings(max_examples=by_depth(10, 60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(KEYS), st.integers()), max_size=300), st.integers(0, 150))
def test_it_is_a_dict_of_which_every_version_stays_as_it_was(changes: list[tuple[bool, str, int]], begin: int) -> None:
    expected: dict[str, int] = dict.fromkeys(KEYS[:begin], -1)
    made = PersistentMap(expected)
    versions: list[tuple[PersistentMap[int], dict[str, int]]] = []
    for drops, key, value in changes:
        versions.append((made, dict(expected)))
        if drops and key in made:
            made = made.without(key)
            del expected[key]
        else:
            made = made.with_item(key, value)
            expected[key] = value
    for version, content in [*versions, (made, expected)]:
        assert list(version.items()) == list(content.items())
        assert len(version) == len(content)
        assert all((key in version) == (key in content) for key in KEYS)


@given(st.integers(1, 200), st.sets(st.sampled_from(KEYS)))
def test_many_values_change_at_once_as_one_after_the_other(begin: int, keys: set[str]) -> None:
    before = PersistentMap(dict.fromkeys(KEYS[:begin], -1))
    values = {key: number for number, key in enumerate(keys) if key in before}
    expected = dict.fromkeys(KEYS[:begin], -1) | values
    made = before.with_values(values)
    assert list(made.items()) == list(expected.items())
    assert set(before.values()) == {-1}


def test_keys_with_one_hash_are_told_apart() -> None:
    keys: list[Any] = [Colliding(f"{number:04}") for number in range(100)]
    made: PersistentMap[int] = PersistentMap()
    for number, key in enumerate(keys):
        made = made.with_item(key, number)
    assert [made[key] for key in keys] == list(range(100))
    assert len(PersistentMap(dict(made)).without(keys[3])) == 99
    assert made.with_values({keys[3]: -3, keys[4]: -4})[keys[4]] == -4

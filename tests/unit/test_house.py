"""Lines of each room may fall freely; where they rise, ``tests/house.toml`` rises in that commit, with the reason."""

import tomllib
from collections import Counter
from pathlib import Path

from tests.unit.test_layers import modules, room_of

MOST = tomllib.loads((Path(__file__).parents[1] / "house.toml").read_text())["lines"]


def lines_of_rooms() -> Counter[str]:
    """Lines with something on them, comments and docstrings included, by room."""
    found: Counter[str] = Counter()
    for module, path in modules().items():
        found[room_of(module).name] += sum(bool(line.strip()) for line in path.read_text().splitlines())
    return found


def test_no_room_grows_unnoticed() -> None:
    grown = {room: lines for room, lines in lines_of_rooms().items() if lines > MOST.get(room, 0)}
    assert grown == {}, "shorten them, or raise their lines in tests/house.toml, and say in the commit what they bring"


def test_every_room_is_listed() -> None:
    assert set(MOST) == set(lines_of_rooms())

import pytest

from tests.unit.schedule.validator import parse_action, parse_row
from varuna.schedule.actions import Action, Kind


def test_an_action_prints_stage_kind_and_micro_batch() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"


def test_what_is_printed_can_be_read_back() -> None:
    row = (Action(0, Kind.FORWARD, 11), Action(0, Kind.RECOMPUTE, 11), Action(0, Kind.BACKWARD, 11))
    assert parse_row(" ".join(map(str, row))) == row


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2F0 "])
def test_what_is_no_action_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        parse_action(text)

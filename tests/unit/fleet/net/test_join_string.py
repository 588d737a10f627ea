"""The string that people paste."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.errors import UsageError
from varuna.fleet.net.join_string import JoinString, parse_invitation

TOKEN = "abcDEF123_-abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "manager.example.org", "fd00::7"])
def test_what_is_printed_can_be_pasted(host: str) -> None:
    invitation = JoinString(host=host, port=7070, fingerprint="ab" * 32, token=TOKEN)
    assert parse_invitation(f"  {invitation}\n") == invitation


@pytest.mark.parametrize(
    "text",
    ["", "http://127.0.0.1:80", f"varuna://{TOKEN}@h:70700/{'ab' * 32}", f"varuna://{TOKEN}@h:0/{'ab' * 32}",
     f"varuna://{TOKEN}@h:7070/{'ab' * 31}", f"varuna://{TOKEN}@h:7070/{'ab' * 32}/x"],
)  # fmt: skip
def test_half_a_string_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(UsageError, match=r"JOIN string.*Copy the whole line"):
        parse_invitation(text)


@given(st.text(max_size=200))
def test_nothing_else_gets_through(text: str) -> None:
    with pytest.raises(UsageError):
        parse_invitation(text)

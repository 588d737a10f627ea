"""Beats that are as before are said by name only, and come out as they went in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.messages import Beat
from varuna.fleet.net.beats import REMEMBERED, BeatMemory
from varuna.fleet.net.protocol import Pulse, up_frame

beats = st.builds(
    Beat,
    generation=st.integers(0, 1),
    step=st.integers(0, 1),
    activity=st.sampled_from(["waits", "runs"]),
    forward_s=st.sampled_from([None, 0.5]),
)
pulses = st.lists(st.dictionaries(st.sampled_from(["n0.0", "n0.1", "n0.2"]), beats), max_size=8)


@given(pulses)
def test_what_is_heard_is_what_was_meant(sent: list[dict[str, Beat]]) -> None:
    speaker, listener = BeatMemory(), BeatMemory()
    before: dict[str, Beat] = {}
    for meant in sent:
        frame = up_frame.validate_json(Pulse(received=0, beats=speaker.shorten(meant)).model_dump_json())
        assert isinstance(frame, Pulse)
        heard = listener.restore(frame.beats)
        assert heard == meant
        for worker, beat in heard.items():
            is_same = before.get(worker) == beat and beat.forward_s is None
            assert (frame.beats[worker] is None) is is_same
            assert not is_same or beat is before[worker], "so that the manager sees at once that nothing is new"
        before |= heard


def test_a_beat_that_is_as_none_before_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first beat of worker n0\.0"):
        BeatMemory().restore({"n0.0": None})


def test_both_ends_forget_the_same_workers_and_no_more_are_kept() -> None:
    speaker, listener, beat = BeatMemory(), BeatMemory(), Beat(generation=0, step=0, activity="waits")
    for number in range(REMEMBERED + 2):
        assert listener.restore(speaker.shorten({f"n0.{number}": beat})) == {f"n0.{number}": beat}
    assert speaker.shorten({"n0.0": beat, "n0.9": beat}) == {"n0.0": beat, "n0.9": None}

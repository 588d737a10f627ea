"""Whether a connection encodes: when it begins, when it ends, how long it pauses, and what kinds should gain."""

from hypothesis import given
from hypothesis import strategies as st

from varuna.engine.base.codec import Form
from varuna.engine.base.coding_choice import Choice, Fit, Window, chosen, pays

LINE_S = 80e-9
"""For a byte, at 100 Mb/s."""


def window(share: float = 1.0, s_per_byte: float = LINE_S, ratio: float = 1.0) -> Window:
    """Messages of which this share waited, and whose bytes passed at that pace; ``ratio``: by encoding."""
    size, sent = 8_000_000, int(8_000_000 / ratio)
    return Window(8, 1.0, size, int(share * size), sent, s_per_byte * size / 2, sent // 2)


def after(*windows: Window, begin: Choice | None = None) -> Choice:
    choice = begin or Choice()
    for each in windows:
        choice = chosen(choice, each)
    return choice


def test_a_line_that_bytes_wait_for_is_tried_with_encoding() -> None:
    choice = after(window())
    assert choice.encodes
    assert abs(choice.plain_s_per_byte - LINE_S) < 1e-12


def test_a_line_that_few_bytes_wait_for_is_not() -> None:
    assert not after(window(share=0.3)).encodes
    assert not after(window(share=0.0, s_per_byte=0.0)).encodes


def test_a_line_that_no_processor_keeps_up_with_is_not_tried() -> None:
    assert not after(window(s_per_byte=0.5e-9)).encodes, "at 16 Gb/s"


def test_it_goes_on_while_bytes_pass_faster_and_wait() -> None:
    faster = window(s_per_byte=LINE_S / 1.4, ratio=1.4)
    assert after(window(), *[faster] * 20).encodes
    assert after(window(), faster._replace(waited_bytes=int(0.3 * faster.size_bytes))).encodes, "that would flutter"


def test_it_ends_where_nothing_waits_any_more_without_a_pause() -> None:
    choice = after(window(), window(share=0.1, s_per_byte=LINE_S / 1.4, ratio=1.4))
    assert not choice.encodes
    assert chosen(choice, window()).encodes


def test_it_ends_where_bytes_pass_no_faster_and_pauses_for_longer_each_time() -> None:
    choice, pauses = Choice(), []
    for _ in range(4):
        while not choice.encodes:
            choice = chosen(choice, window())
        choice = chosen(choice, window(ratio=1.4))
        assert not choice.encodes
        pauses.append(choice.windows)
    assert pauses == [8, 32, 128, 128]


def test_a_gain_forgets_the_pauses_before() -> None:
    choice = after(window(), window())
    assert choice.pause > Choice().pause
    while not choice.encodes:
        choice = chosen(choice, window())
    assert chosen(choice, window(s_per_byte=LINE_S / 1.4, ratio=1.4)).pause == Choice().pause


def test_the_plain_line_is_measured_anew_now_and_then() -> None:
    """It may be wider by now: then what was measured long ago would keep encoding on for ever."""
    choice, faster = after(window()), window(s_per_byte=LINE_S / 1.4, ratio=1.4)
    many = 0
    while choice.encodes:
        choice, many = chosen(choice, faster), many + 1
        assert many < 100
    wide = chosen(choice, window(s_per_byte=LINE_S / 100))
    assert abs(wide.plain_s_per_byte - LINE_S / 100) < 1e-12


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1e-10, 1e-6), st.floats(1, 4)), max_size=200))
def test_no_line_is_encoded_for_ever_without_a_look_at_it_as_it_is(seen: list[tuple[float, float, float]]) -> None:
    choice, since = Choice(), 0
    for share, s_per_byte, ratio in seen:
        choice = chosen(choice, window(share, s_per_byte, ratio if choice.encodes else 1.0))
        since = since + 1 if choice.encodes else 0
        assert since <= 32
        assert 8 <= choice.pause <= 128


def test_a_kind_pays_if_it_shrinks_and_encoding_is_faster_than_the_line() -> None:
    bf16 = Fit(Form(2, 1), 1.45, 6e-9)
    assert pays(bf16, LINE_S)
    assert pays(bf16, LINE_S / 10), "at 1 Gb/s"
    assert not pays(bf16, LINE_S / 100), "at 10 Gb/s"
    assert not pays(bf16._replace(ratio=1.05), LINE_S), "noise"
    assert not pays(bf16._replace(s_per_byte=LINE_S), LINE_S), "a slow processor"

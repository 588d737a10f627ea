from varuna.calibration.windows import choose_windows, sizes_to_measure, window_bytes
from varuna.core.model import ModelFacts, SectionFacts
from varuna.engine.device.capacity import sharers


def model(sections: int, state_bytes: int = 100) -> ModelFacts:
    section = SectionFacts(
        label="",
        forward_s=1.0,
        parameter_bytes=state_bytes,
        trainable_bytes=0,
        optimizer_bytes=0,
        activation_bytes=10,
        boundary_bytes=0,
    )
    return ModelFacts(digest="", sections=(section,) * sections)


KINDS = (0, *(1, 2) * 5, 11)  # embedding, five layers of two halves, head


def test_a_model_that_fits_is_measured_whole() -> None:
    facts = model(12)
    assert choose_windows(facts, KINDS, memory_bytes=None) == (range(12),)
    assert choose_windows(facts, KINDS, memory_bytes=12 * 110) == (range(12),)


def test_a_larger_one_is_measured_where_it_shows_something_new() -> None:
    windows = choose_windows(model(12), KINDS, memory_bytes=4 * 110)
    assert windows == (range(4), range(10, 12))
    assert {KINDS[section] for window in windows for section in window} == set(KINDS)


def test_every_window_fits_or_is_one_section() -> None:
    facts = model(12)
    for memory_bytes in range(50, 12 * 110, 70):
        windows = choose_windows(facts, KINDS, memory_bytes=memory_bytes)
        assert {KINDS[section] for window in windows for section in window} == set(KINDS)
        assert all(len(each) == 1 or window_bytes(facts, each, 1) <= memory_bytes for each in windows)


def test_sizes_are_powers_of_two_or_around_the_users_own() -> None:
    assert sizes_to_measure(20, None) == (1, 2, 4, 8, 16)
    assert sizes_to_measure(1, None) == (1,)
    assert sizes_to_measure(20, 6) == (3, 6)
    assert sizes_to_measure(20, 1) == (1,)


def test_a_gpu_is_shared_by_the_workers_that_are_dealt_to_it() -> None:
    assert [sharers(workers, 4) for workers in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]

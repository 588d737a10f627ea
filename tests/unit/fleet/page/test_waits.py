from varuna.fleet.page.chronicle import Waits
from varuna.fleet.state.run_events import WaitsSplit


def split(generation: int, step: int, transfer_s: tuple[float, ...], idle_s: tuple[float, ...]) -> WaitsSplit:
    return WaitsSplit(generation=generation, step=step, transfer_s=transfer_s, idle_s=idle_s, uncertain_s=step / 1024)


def test_shares_are_of_all_steps_of_the_newest_generation_that_were_looked_at() -> None:
    waits = Waits()
    assert waits.describe() is None
    waits.add_split(split(3, 4, (1.0, 0.0), (1.0, 0.0)))
    waits.add_split(split(3, 9, (2.0, 0.0), (0.0, 0.0)))
    told = {"generation": 3, "step": 9, "looks": 2, "uncertain_s": 9 / 1024, "transfer_share": [0.75, 0.0]}
    assert waits.describe() == told
    waits.add_split(split(2, 3, (9.0, 9.0), (0.0, 0.0)))  # the last step before the morph, which comes late
    assert waits.describe() == told
    waits.add_split(split(4, 12, (0.0,), (5.0,)))
    assert waits.describe() == {
        "generation": 4,
        "step": 12,
        "looks": 1,
        "uncertain_s": 12 / 1024,
        "transfer_share": [0.0],
    }

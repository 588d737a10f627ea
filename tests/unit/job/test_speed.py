"""Lines of a run without a manager on its speed."""

from varuna.job.speed import SpeedLines


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_now_and_then_and_one_at_the_end() -> None:
    clock, told = _Clock(), list[str]()
    lines = SpeedLines(1000, lambda step: 64 * step, tell=told.append, every_s=10.0, clock=clock)
    clock.now_s = 30.0  # capture, the check, measuring
    for step in range(26):
        lines.add_step(step, 5.0 - step / 10)
        clock.now_s += 0.5
    assert told == [
        "step 2/1000  loss 4.9000  128 examples/s  8m 19s left",
        "step 22/1000  loss 2.9000  128 examples/s  8m 09s left",
    ]
    lines.close()
    assert told[2:] == ["26 steps, loss 5.0000 to 2.5000; after the first one 128 examples/s, 12.5 s"]


def test_a_run_of_one_step_has_no_speed() -> None:
    told = list[str]()
    lines = SpeedLines(1, lambda step: 64 * step, tell=told.append, every_s=0.0)
    lines.close()
    lines.add_step(0, 5.0)
    lines.close()
    assert told == []

"""Outcomes of the same computation are compared whatever their tensors hold."""

import torch

from varuna.checks.compare import TOLERANCES, differences
from varuna.checks.outcome import Outcome


def test_buffers_of_truth_values_and_of_complex_numbers_are_compared() -> None:
    def outcome(seen: list[bool], turn: complex) -> Outcome:
        buffers = {"seen": torch.tensor(seen), "turn": torch.tensor([turn])}
        return Outcome((1.0,), 1.0, {}, buffers)

    def odd(one: Outcome, two: Outcome) -> set[str]:
        return {each.name for each in differences(one, two, TOLERANCES[torch.float32])}

    assert odd(outcome([True, False], 1j), outcome([True, False], 1j)) == set()
    assert odd(outcome([True, True], 1j), outcome([True, False], 1 + 0j)) == {"seen", "turn"}

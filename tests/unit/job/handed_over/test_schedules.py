"""Objects that steer the rates of a loop are found, and those that the run advances itself are left alone."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from varuna.job.built import as_functions
from varuna.job.handed_over.schedules import steering_of_loop


class Base(ABC):
    """A base class for trainers, as templates of projects have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.epochs, self.seen = optimizer, 3, 0

    @abstractmethod
    def fit(self) -> None:
        """Train."""


class Trainer(Base):
    """The script's own."""

    def fit(self) -> None:
        self.seen += 1


def test_what_the_loop_changes_in_an_object_around_the_optimizer_is_its_state() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    trainer = Trainer(optimizer)
    (kept,) = steering_of_loop(optimizer, []).values()
    assert kept.state_dict() == {}
    trainer.fit()
    assert kept.state_dict() == {"seen": 1}
    kept.load_state_dict({})
    assert trainer.seen == 0
    kept.load_state_dict({"seen": 7})
    assert (trainer.seen, trainer.epochs) == (7, 3)


def test_a_scheduler_that_the_run_advances_is_not_asked() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    as_functions(model, optimizer, schedule).guard()
    assert steering_of_loop(optimizer, [schedule]) == {}

"""For learners whose samples are made while they train: what others append enters, samples by position leave.

What reads samples does not know this package: it asks any dataset for ``wait_for`` and ``set_step``.
"""

from varuna.extras.rollouts.dataset import Rollouts
from varuna.extras.rollouts.log import append

__all__ = ["Rollouts", "append"]

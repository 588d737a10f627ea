"""TRL's trainers over Varuna: ``from varuna.integrations.trl import SFTTrainer, DPOTrainer`` in an unchanged script.

In: TRL's own configurations and forms of data, which its own code prepares. Out: a training with TRL's losses.
Importing this imports ``trl``.
"""

from varuna.integrations.trl.dpo import DPOTrainer
from varuna.integrations.trl.sft import SFTTrainer

__all__ = ["DPOTrainer", "SFTTrainer"]

"""Hugging Face's Trainer over Varuna: ``from varuna.integrations.transformers import Trainer`` in an unchanged script.

Importing this imports ``transformers``.
"""

from varuna.integrations.transformers.trainer import Seq2SeqTrainer, Trainer

__all__ = ["Seq2SeqTrainer", "Trainer"]

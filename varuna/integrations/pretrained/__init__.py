"""Pretrained models from folders, adapters over them, and chats as samples.

In: folders and files of a user, refused in words before anything is captured. Out: configurations, modules and samples
for ``varuna.Trainer``. Importing this imports ``transformers``.
"""

from varuna.integrations.pretrained.adapters import adapted, beside_base
from varuna.integrations.pretrained.chats import Chats, Pairs
from varuna.integrations.pretrained.folder import config_of, records, tokenizer_of, weights_of

__all__ = ["Chats", "Pairs", "adapted", "beside_base", "config_of", "records", "tokenizer_of", "weights_of"]

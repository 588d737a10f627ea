"""Real text without a download: the sources of the running interpreter's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def read_standard_library(limit_bytes: int = 2_000_000) -> bytes:
    """Return sources in the order of their paths, joined and cut at ``limit_bytes``: the same for one interpreter."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
            if len(text) >= limit_bytes:
                break
    return bytes(text[:limit_bytes])


class TextDataset(Dataset[dict[str, Tensor]]):
    """Windows of ``length`` byte tokens; the model shifts the labels itself, as all Hugging Face models do."""

    def __init__(self, length: int) -> None:
        text = bytearray(read_standard_library())
        windows = len(text) // length
        self.windows = torch.frombuffer(text, dtype=torch.uint8)[: windows * length].view(windows, length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.windows[index].long()
        return {"input_ids": tokens, "labels": tokens.clone()}

"""The modes in which a model's modules train."""

from torch import nn


def into_training(module: nn.Module) -> nn.Module:
    """Put a model into the modes that it trains in, and return it.

    A model in evaluation mode, as ``from_pretrained`` returns it, is put into training mode as a whole. So is one whose
    modules are all in training mode, for what its own ``train()`` does besides. In a model in training mode that has
    modules in evaluation mode (a frozen backbone, frozen batch normalisation) each module keeps its mode.
    """
    if not module.training or all(each.training for each in module.modules()):
        module.train()
    return module


def in_evaluation(module: nn.Module) -> list[str]:
    """Paths of the outermost modules in evaluation mode of a model in training mode."""
    found: list[str] = []
    for path, each in module.named_modules():
        if not each.training and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    return found

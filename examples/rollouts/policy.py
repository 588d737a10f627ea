"""Model of the learner and the rollout processes: a policy over a small vocabulary, and a toy reward."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

STATES, WIDTH = 16, 32


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


class Policy(nn.Module):
    """Chooses an action for each state."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(STATES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, STATES)

    def forward(self, state: Tensor) -> Tensor:
        """Return the log probabilities of the actions."""
        x = self.embed(state)
        for block in self.blocks:
            x = block(x)
        return nn.functional.log_softmax(self.head(x), dim=-1)


def reward(state: Tensor, action: Tensor) -> Tensor:
    """Return 1 for the one action that is right in a state."""
    return ((7 * state + 3) % STATES == action).float()


def clipped_loss(log_probs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return PPO's loss: a sample of an older policy counts by how much likelier its action has become."""
    chosen = log_probs.gather(-1, batch["action"][:, None])[:, 0]
    ratio = (chosen - batch["log_prob"]).exp()
    advantage = batch["advantage"]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

"""Plays with the newest policy and appends what it sees, until it is ended; start as many as you like.

python examples/rollouts/roll.py FOLDER
"""

import time
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from policy import STATES, Policy, reward
from safetensors.torch import load_file
from torch import Tensor

from varuna.extras.rollouts import append

TRIES = 8
"""of each state; the advantage of one is over their mean"""


def play(policy: Policy) -> dict[str, Tensor]:
    """Try some states several times."""
    states = torch.randint(STATES, (4,))
    with torch.no_grad():
        log_probs = policy(states)
    actions = torch.multinomial(log_probs.exp(), TRIES, replacement=True)
    rewards = reward(states[:, None], actions)
    return {
        "state": states.repeat_interleave(TRIES),
        "action": actions.flatten(),
        "log_prob": log_probs.gather(-1, actions).flatten(),
        "advantage": (rewards - rewards.mean(1, keepdim=True)).flatten(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description="Play with the newest policy, for a learner.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two appends")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)  # version 0 is the learner's model before its first step, which has seed=0
    policy, version = Policy(), 0
    torch.seed()
    while True:
        newest = (args.folder / "served" / "latest").resolve()
        if newest.name not in ("latest", f"step-{version:08d}"):
            with suppress(FileNotFoundError):  # replaced by a newer one meanwhile
                parts = [load_file(file) for file in newest.glob("*.safetensors")]  # one for each stage
                policy.load_state_dict({name: value for part in parts for name, value in part.items()})
                version = int(newest.name.removeprefix("step-"))
        append(args.folder / "rollouts", play(policy), version=version)
        time.sleep(args.pause)


if __name__ == "__main__":
    main()

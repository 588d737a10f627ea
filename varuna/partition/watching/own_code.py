"""Files of torch and of Varuna itself: a user who is to act on an error works outside of both."""

import os
from pathlib import Path

import torch

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
VARUNA = f"{Path(__file__).parents[2]}{os.sep}"
OWN = (TORCH, VARUNA)
"""Beginnings of paths, each with its separator: torchvision's files are not torch's."""

"""Names in a checkpoint directory.

::

    <directory>/
        config.json                                  the model's configuration, if it has one
        lease/000003.json                            who may commit here
        lease/config.sha256                          of the configuration: only that one is ever replaced
        step-00000010/                               10 steps are committed; step 10 runs next
            section-000.0of2.g1.5f0c….safetensors    part 0 of 2, saved by generation 1
            section-000.1of2.g1.9b1e….safetensors
            section-001.0of1.g1.77a2….safetensors
            manifest.json                            written last: without it the folder is not a checkpoint
            sums-000.g1.5f0c….0.safetensors          of the step that follows: one section's sums of gradients
            damaged.txt                              only if a reader found it so: never used again
        replaced-1/step-…/                           moved aside by --new --overwrite
"""

import re
from typing import NamedTuple

MANIFEST = "manifest.json"
DAMAGED = "damaged.txt"
CONFIG = "config.json"
CONFIG_NOTE = "lease/config.sha256"
START_AFRESH = "--new --overwrite (without `varuna run`: VARUNA_NEW=overwrite)"
_STEP = re.compile(r"step-(\d{8,})")
_SHARD = re.compile(r"section-(\d{3,})\.(\d+)of(\d+)\.g(\d+)\.[0-9a-f]{8,}\.safetensors")
_SUMS = re.compile(r"sums-(\d{3,})\.g\d+\.[0-9a-f]{8,}\.\d+\.safetensors")


class ShardName(NamedTuple):
    """The parts of the name of a shard's file."""

    section: int
    part: int
    parts: int
    generation: int


def step_folder(step: int) -> str:
    """Name the folder of the checkpoint after ``step`` committed steps."""
    return f"step-{step:08d}"


def parse_step(folder: str) -> int | None:
    """Parse the step of a folder's name; None if it is not a checkpoint's folder."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match else None


def shard_file(name: ShardName, writer: str) -> str:
    """Name the file of a part of a section. The name is this writer's alone, so no other can overwrite the file."""
    return f"section-{name.section:03d}.{name.part}of{name.parts}.g{name.generation}.{writer}.safetensors"


def parse_shard_file(file: str) -> ShardName:
    """Parse the file name of a shard: the inverse of ``shard_file``.

    Raises:
        ValueError: it is not one; a path is refused too, since names come from other machines.
    """
    match = _SHARD.fullmatch(file)
    if match is None:
        example = shard_file(ShardName(3, 0, 1, 1), "0123456789abcdef")
        raise ValueError(f"{file!r} is not the file name of a shard, such as {example!r}")
    return ShardName(*map(int, match.groups()))


def sums_file(section: int, generation: int, writer: str, number: int) -> str:
    """Name the file of a section's sums of gradients, as one replica has them; it writes another one each time."""
    return f"sums-{section:03d}.g{generation}.{writer}.{number}.safetensors"


def parse_sums_file(file: str) -> int | None:
    """Parse the section of a file of sums; None if it is another file."""
    match = _SUMS.fullmatch(file)
    return int(match[1]) if match else None


def checkpoint_place(directory: str, step: int) -> str:
    """Name a checkpoint's place in one string, for messages and assignments."""
    return f"{directory}/{step_folder(step)}"


def split_place(place: str) -> tuple[str, int]:
    """Split the place of a checkpoint into store and step: the inverse of ``checkpoint_place``.

    Raises:
        ValueError: it is not the place of a checkpoint.
    """
    directory, _, folder = place.rpartition("/")
    step = parse_step(folder)
    if step is None:
        raise ValueError(f"{place!r} does not end with the folder of a checkpoint, such as {step_folder(10)}")
    return directory, step

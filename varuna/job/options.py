"""Options of a Trainer that belong together, as values: ``checkpoints="path"``, ``loss=fn`` and the like in full."""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, get_args

from varuna.core.errors import UsageError
from varuna.core.saved import SAVED_EVERY_S
from varuna.data.collate import CollateFunction
from varuna.job.arguments import check_function, check_number, check_whole, described
from varuna.partition.batch_weight import WeightFunction
from varuna.partition.capture.capture import LossFunction
from varuna.partition.lengths import check_lengths
from varuna.store.opening import location

CHECKPOINTED_EVERY = timedelta(seconds=SAVED_EVERY_S)

OnNan = Literal["stop", "continue"]
"""Reaction of a run to a loss or gradients of a step that are not finite."""
EmaFrom = Literal["start", "first step"]
"""First values of an average of the parameters: what they are before the first step, or after it."""
Missing = Literal["refuse", "initialise"]
"""Treatment of parameters that ``weights`` lacks, or has in another shape."""


@dataclass(frozen=True)
class Checkpoints:
    """Rules for saving a run's state: where, when, and what to keep. The same command then resumes from it.

    Attributes:
        path: folder that all machines share, or URL (``s3://``, ``gs://``, ``az://``).
        every: steps (int) or time between checkpoints. Default: 10 minutes. With a manager, a minute while
            every section is held once, since a lost worker may then cost the steps since the newest checkpoint; and,
            once workers were lost, as often as pays (Young's rule). A step that lasts longer than the time between them
            is saved in parts.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep, for good, the checkpoints whose step is a multiple of this.
        frozen: also save parameters that are not trained. False: they are read again from where the run began.
        other_data: resume though the dataset had another length, or other samples, when the checkpoint was written;
            the order from there on is that of the new length.
        upload_bytes_per_s: limit on what a worker sends to a bucket, to leave some of the network to training.

    Raises:
        UsageError: one of them is out of range.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int | timedelta = CHECKPOINTED_EVERY
    keep_last: int = 3
    keep_every: int | None = None
    frozen: bool = True
    other_data: bool = False
    upload_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise UsageError(
                f"checkpoints={self.path!r} must be a folder, a URL or varuna.Checkpoints(path, every=...), but is "
                f"{described(self.path)}"
            )
        _ = self.place
        if not isinstance(self.every, timedelta):
            check_whole(every=self.every)
        check_whole(keep_last=self.keep_last, keep_every=self.keep_every)
        check_number(upload_bytes_per_s=self.upload_bytes_per_s)
        if (self.every.total_seconds() if isinstance(self.every, timedelta) else self.every) <= 0:
            raise UsageError(f"every={self.every} must be above 0: steps (int) or a timedelta between checkpoints")
        if self.keep_last < 1:
            raise UsageError(f"keep_last={self.keep_last} must be at least 1: the newest checkpoint is always kept")
        if self.keep_every is not None and self.keep_every < 1:
            raise UsageError(
                f"keep_every={self.keep_every} must be at least 1 step; leave it out to keep only the newest"
            )
        if self.upload_bytes_per_s is not None and not self.upload_bytes_per_s > 0:
            raise UsageError(f"upload_bytes_per_s={self.upload_bytes_per_s} must be above 0; leave it out for no limit")

    @property
    def place(self) -> str:
        """The path as all processes of a run should name it: absolute, or a URL."""
        return location(self.path)


@dataclass(frozen=True)
class Publish:
    """Rules for publishing a run's model while it trains, for a server that watches the folder.

    Attributes:
        path: folder. If workers run on several machines, all of them must share it.
        every: steps between publications; the last step of a run is published, too.
        keep: number of newest publications to keep.

    Raises:
        UsageError: one of them is out of range, or the path is no folder.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int
    keep: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)) or "://" in str(self.path):
            raise UsageError(
                f"Publish({self.path!r}): publications appear in a folder, which all machines share, and not in "
                f"{'a bucket' if isinstance(self.path, str) else described(self.path)}. For a bucket, give "
                "checkpoints= a URL, and export from there with varuna checkpoints export."
            )
        check_whole(every=self.every, keep=self.keep)
        if self.every < 1:
            raise UsageError(f"every={self.every} must be at least 1: steps between publications")
        if self.keep < 1:
            raise UsageError(f"keep={self.keep} must be at least 1: the newest publication is always kept")

    @property
    def folder(self) -> Path:
        """The path, absolute."""
        return Path(self.path).absolute()


@dataclass(frozen=True)
class Weights:
    """Files with the first values of parameters, and what to do about those that are not there.

    Attributes:
        path: safetensors file, or folder written by ``save_pretrained``.
        missing: ``"refuse"``, or ``"initialise"``: parameters that the files lack, or have in another shape, are drawn
            as ``init`` says. Such a model has a new head.

    Raises:
        UsageError: one of them is out of range.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    missing: Missing = "refuse"

    def __post_init__(self) -> None:
        if self.missing not in get_args(Missing):
            raise UsageError(f"missing={self.missing!r} must be one of {', '.join(get_args(Missing))}")


@dataclass(frozen=True)
class Loss:
    """The loss of a batch, and what it is a mean over.

    Attributes:
        function: ``fn(output, batch)`` that returns a scalar mean. Left out: the model returns its loss itself.
        weight: ``fn(batch)``: how much a micro-batch counts. Default: what its loss averages over, term by term.
        per_micro_batch: with the Trainer's ``micro_batch``: compute a loss that mixes examples within each micro-batch.

    Raises:
        UsageError: one of them cannot be called as it will be.
    """

    function: LossFunction | None = None
    _: KW_ONLY
    weight: WeightFunction | None = None
    per_micro_batch: bool = False

    def __post_init__(self) -> None:
        check_function("loss", self.function)
        check_function("weight", self.weight)


@dataclass(frozen=True)
class Collate:
    """The function that makes a micro-batch of samples, and the shapes that a micro-batch may have.

    Attributes:
        function: from a list of samples to a dict of tensors, or a nest of dicts and lists of them. Their first
            dimension is the batch, or samples are joined otherwise, as in one row of packed tokens, or the nodes of
            graphs. Samples that are None it may leave out. Default: stack.
        lengths: sizes that dimension 1 of the collated tensors may have, one for all of a micro-batch. Default: the
            first samples' only.

    Raises:
        UsageError: the function cannot be called, or the lengths are not a list of different positive numbers.
    """

    function: CollateFunction | None = None
    _: KW_ONLY
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_function("collate", self.function)
        check_lengths(self.lengths)

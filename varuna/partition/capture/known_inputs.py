"""Values that export may know of its arguments: the first samples, buffers, and the first parameters."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from varuna.data.randomness import seeded
from varuna.partition.capture.real_values import Given, ValueSource
from varuna.process.host_lock import turn

FOLLOWED_BELOW_BYTES = 2**30
"""Bytes of parameters in fp32; a larger model is not built to see where its branches on activations go."""


@dataclass
class KnownInputs:
    """Values of one capture, by grade."""

    build: Callable[[], nn.Module]
    model: nn.Module
    """without data: the tensors that export is given"""
    inputs: Mapping[str, Tensor]
    """the batch without data"""
    samples: Mapping[str, Tensor]
    """the batch"""
    buffers: Mapping[str, Tensor]
    """values that the constructor gives to buffers, where they are known"""
    _turn: ExitStack = field(default_factory=ExitStack)
    _whole: dict[str, Tensor] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """In this block, one worker of a host at a time builds whole models."""
        with self._turn:
            yield
            self._whole = None

    @property
    def is_small(self) -> bool:
        """Whether the model is small enough to be built."""
        return sum(4 * value.numel() for value in self.model.parameters()) < FOLLOWED_BELOW_BYTES

    def of(self, most: ValueSource) -> Given | None:
        """Values of tensors up to a grade, which operations may write to; None if there are none of that grade."""
        if most is ValueSource.CODE:
            return {}
        if most is ValueSource.PARAMETERS and not self.is_small:
            return None
        named = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        known = self._built() if most is ValueSource.PARAMETERS else self.buffers
        found = {id(self.inputs[key]): (value.clone(), ValueSource.SAMPLES) for key, value in self.samples.items()}
        for name, value in known.items():
            if name in named and named[name].shape == value.shape:
                is_first = isinstance(named[name], nn.Parameter)
                grade = ValueSource.PARAMETERS if is_first else ValueSource.SAMPLES
                found[id(named[name])] = (value.to(named[name].dtype, copy=not is_first), grade)
        return found

    def _built(self) -> dict[str, Tensor]:
        """The model as ``torch.manual_seed(0); build()`` makes it, so that all workers and seeds agree."""
        if self._whole is None:
            names = repr([(name, tuple(value.shape)) for name, value in self.model.named_parameters()])
            self._turn.enter_context(turn(hashlib.sha256(names.encode()).hexdigest()))
            with seeded(0), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = self.build()
            self._whole = {
                name: value.detach() for name, value in (*module.named_buffers(), *module.named_parameters())
            }
        return self._whole

"""First values of a run: the constructor's values, each parameter's own draws, or a checkpoint's tensors.

All three are the same for every P and D. Only the first needs the memory of a whole model, for a moment.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from varuna.core.errors import ModelError, UsageError
from varuna.partition.capture.capture import Recipe
from varuna.partition.capture.construction import Construction, construct
from varuna.partition.initial.constructor import Initial, check_shapes, materialise, select
from varuna.partition.initial.pretrained import Fit, TensorEntry, fingerprint, fit, list_entries, read_tensors, some
from varuna.process.console import say, warn
from varuna.process.host_lock import turn

Init = Literal["constructor", "per_parameter"]
Shapes = Mapping[str, tuple[int, ...]]
Check = Callable[[Initial | None], None]
"""Looks at the whole model: what it does to it stays without consequence. None: it is too large to be built here."""

_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
WORTH_COLLECTING_BYTES = 64 * 2**20
"""Bytes from which garbage is collected: a collection takes some tenths of a second, however small the model."""
CHECKED_BELOW_BYTES = 2**30
"""Bytes below which a model is materialised just for the check of its weighing."""


class InitialParameters(Protocol):
    """A source of first values."""

    @property
    def name(self) -> str:
        """The source's name in the job's facts, on which all workers must agree."""

    @property
    def stored(self) -> Set[str]:
        """Parameters that any worker can read each by itself: from files, or from a model that all have built."""

    def parameters(self, names: Iterable[str], check: Check | None = None) -> dict[str, Tensor]:
        """Values of some parameters, which the caller may change; ``check`` sees the whole model, if any may."""

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of some buffers."""

    def whole_model(self) -> Initial:
        """The whole model, for tools that look at it."""


def begin_with(
    recipe: Recipe,
    shapes: Shapes,
    *,
    seed: int,
    init: Init,
    weights: Path | None,
    digest: str,
    may_miss: bool = False,
    held: Mapping[str, Tensor] | None = None,
) -> InitialParameters:
    """Choose the source of initial values that the user asked for.

    Args:
        recipe: the model.
        shapes: parameter -> shape, as captured.
        seed: of initialisation.
        init: how parameters are drawn that are not in ``weights``.
        weights: a safetensors file or folder.
        digest: of the job: its workers on one host build the model in turn.
        may_miss: parameters that ``weights`` lacks, or has in another shape, are drawn.
        held: parameters of a model that every worker has in host memory.

    Raises:
        ModelError: the constructor cannot be replayed for one parameter at a time.
        CheckpointError: the weights cannot be read, or are of another model.
    """
    drawn = (
        partial(PerParameter, recipe, shapes, seed, digest)
        if init == "per_parameter"
        else partial(Constructor, recipe, shapes, seed, digest, held or {})
    )
    return (
        drawn() if weights is None else Pretrained(recipe, shapes, seed, weights, digest, drawn if may_miss else None)
    )


def check_beginning(init: str, weights: object, *, may_miss: bool = False) -> None:
    """Refuse arguments that are wrong whatever the model is.

    Raises:
        UsageError: an unknown ``init``, both arguments where nothing may be missing, or no such path.
    """
    if init not in ("constructor", "per_parameter"):
        raise UsageError(f'init={init!r} must be "constructor" or "per_parameter"')
    if weights is None:
        return
    if init != "constructor" and not may_miss:
        raise UsageError(f"weights= sets every parameter: leave out either init={init!r} or weights=")
    if not isinstance(weights, (str, Path)) and not hasattr(weights, "__fspath__"):
        raise UsageError(f"weights= is the path of a safetensors file or folder, not a {type(weights).__name__}")
    if not Path(weights).exists():
        raise UsageError(
            f"weights={str(weights)!r} does not exist on this machine. Save a folder with "
            "model.save_pretrained(folder), or download one, such as with "
            "huggingface_hub.snapshot_download('google-bert/bert-base-uncased'), which returns its path; every machine "
            "needs it."
        )


class Constructor:
    """The model's own initialisation, as ``torch.manual_seed(seed); build()``; or one that is built already."""

    name = "constructor"

    def __init__(
        self, recipe: Recipe, shapes: Shapes, seed: int, digest: str, held: Mapping[str, Tensor] = _NOTHING
    ) -> None:
        self._recipe, self._shapes, self._seed, self._digest, self._held = recipe, shapes, seed, digest, held

    @property
    def stored(self) -> Set[str]:
        """Parameters that are in every worker's memory already."""
        return self._held.keys()

    def parameters(self, names: Iterable[str], check: Check | None = None) -> dict[str, Tensor]:
        """Build the model when it is this worker's turn, keep some of it, free the rest."""
        if self._held and check is None:
            return {name: self._held[name].detach().clone() for name in names}
        with turn(self._digest):
            kept = self._kept(names, check)
            if sum(4 * torch.Size(shape).numel() for shape in self._shapes.values()) > WORTH_COLLECTING_BYTES:
                gc.collect()  # modules that refer to each other would keep the rest alive
        return kept

    def _kept(self, names: Iterable[str], check: Check | None) -> dict[str, Tensor]:
        initial = self.whole_model()
        kept = select(initial, names)  # first: whatever a check does to the model, the run begins as it was built
        if check is not None:
            check(initial)
        return kept

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of some buffers, without the memory of the parameters where that is possible."""
        wanted = list(names)
        try:
            construction = construct(self._recipe.build, self._seed)
            if not any(construction.is_random(name) for name in wanted):
                return {name: construction.buffer(name, self._seed) for name in wanted}
        except (ModelError, KeyError):  # then the model itself says
            pass
        with turn(self._digest):
            initial = self.whole_model()
            return {name: initial.buffers[name].clone() for name in wanted}

    def whole_model(self) -> Initial:
        """The whole model."""
        initial = materialise(self._recipe, self._seed)
        check_shapes(self._shapes, {name: tuple(value.shape) for name, value in initial.parameters.items()})
        return initial


class PerParameter:
    """Every parameter drawn by itself, from a generator keyed by (seed, name)."""

    name = "per_parameter"
    stored: Set[str] = frozenset()

    def __init__(self, recipe: Recipe, shapes: Shapes, seed: int, digest: str) -> None:
        self._recipe, self._shapes, self._seed, self._digest = recipe, shapes, seed, digest
        self.construction.check_independent()

    @cached_property
    def construction(self) -> Construction:
        """The recorded constructor."""
        found = construct(self._recipe.build, self._seed)
        check_shapes(self._shapes, found.shapes)
        return found

    def parameters(self, names: Iterable[str], check: Check | None = None) -> dict[str, Tensor]:
        """Replay what the constructor does to each."""
        _check_small(self._recipe, self._shapes, self._seed, self._digest, check)
        return {name: self.construction.parameter(name, self._seed) for name in names}

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Replay what the constructor does to each."""
        return {name: self.construction.buffer(name, self._seed) for name in names}

    def whole_model(self) -> Initial:
        """The whole model with these values in place of the constructor's."""
        return _filled(materialise(self._recipe, self._seed), self)


class Pretrained:
    """A checkpoint's parameters and saved buffers; all other buffers as the constructor makes them."""

    def __init__(
        self,
        recipe: Recipe,
        shapes: Shapes,
        seed: int,
        path: Path,
        digest: str,
        drawn: Callable[[], InitialParameters] | None = None,
    ) -> None:
        """Look at the files, without reading values.

        Args:
            recipe: the model.
            shapes: parameter -> shape, as captured.
            seed: of initialisation.
            path: a safetensors file or folder.
            digest: of the job.
            drawn: makes the source of parameters that the files lack; None: they may lack none.
        """
        self._recipe, self._shapes, self._seed, self._digest = recipe, shapes, seed, digest
        self.construction = construct(recipe.build, seed)
        check_shapes(shapes, self.construction.shapes)
        entries = list_entries(path)
        self._fit: Fit = fit(entries, shapes, self.construction.aliases, str(path), may_miss=drawn is not None)
        self._drawn = drawn() if drawn is not None and self._fit.without else None
        saved = self.construction.saved_buffers
        self._buffers: dict[str, TensorEntry] = {name: entry for name, entry in entries.items() if name in saved}
        self._path = path
        self.name = f"weights:{fingerprint(entries)}" + (f"+{self._drawn.name}" if self._drawn else "")

    @property
    def stored(self) -> Set[str]:
        """Parameters that the files have."""
        return self._shapes.keys() - self._fit.without

    def parameters(self, names: Iterable[str], check: Check | None = None) -> dict[str, Tensor]:
        """Read these tensors and no others; draw those that the files lack."""
        if check is not None:  # said once, by the rank that checks
            self._tell()
        _check_small(self._recipe, self._shapes, self._seed, self._digest, check)
        wanted, without = list(names), self._fit.without
        found = read_tensors({name: self._fit.entries[name] for name in wanted if name not in without})
        if self._drawn is not None and (new := [name for name in wanted if name in without]):
            found.update(self._drawn.parameters(new))
        return {name: found[name] for name in wanted}

    def _tell(self) -> None:
        """Say what is not as in the files."""
        new, unexpected = self._fit.without, [n for n in self._fit.unexpected if n not in self.construction.buffers]
        if new:
            read = len(self._shapes) - len(new)
            say(
                f"{read} of {len(self._shapes)} parameters are read from {self._path}; {len(new)} are initialised "
                f"({self._fit.differences})"
            )
        if unexpected:
            warn(f"the model has no place for {some(unexpected)} of {self._path}")

    def buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of some buffers: from the file if the model saves them, else as the constructor makes them."""
        made = {name: self.construction.buffer(name, self._seed) for name in names}
        read = read_tensors({name: entry for name, entry in self._buffers.items() if name in made})
        for name, value in read.items():
            if value.shape == made[name].shape:
                made[name] = value.to(made[name].dtype)
        return made

    def whole_model(self) -> Initial:
        """The whole model with these values in place of the constructor's."""
        return _filled(materialise(self._recipe, self._seed), self)


def _check_small(recipe: Recipe, shapes: Shapes, seed: int, digest: str, check: Check | None) -> None:
    """Run a check that needs the whole model, with the constructor's values, unless that takes too much memory."""
    if check is None:
        return
    size = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    if size < CHECKED_BELOW_BYTES:
        with turn(digest):
            check(materialise(recipe, seed))
    else:
        check(None)


def _filled(initial: Initial, beginning: InitialParameters) -> Initial:
    for name, value in beginning.parameters(initial.parameters).items():
        initial.parameters[name].copy_(value)
    for name, value in beginning.buffers(initial.buffers).items():
        initial.buffers[name].copy_(value)
    return initial

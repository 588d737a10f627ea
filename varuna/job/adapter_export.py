"""Adapters of PEFT, as ``PeftModel.from_pretrained`` reads them back: only them, and their configuration."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.core.errors import CheckpointError, UsageError
from varuna.engine.worker.export import gather_model, write_tensors
from varuna.engine.worker.generation import Generation
from varuna.job.built import GivenModel
from varuna.job.spec import JobSpec
from varuna.partition.capture.building import build_without_data
from varuna.partition.watching.fake_mode import FakeMode

ADAPTER = "adapter_model.safetensors"
"""PEFT's name of the file with the values."""


def export_adapter(generation: Generation | None, spec: JobSpec, folder: Path, *, average: bool) -> None:
    """Gather what was trained on the main rank and write it as an adapter; other ranks send their part.

    Args:
        generation: the newest one; None on a spare.
        spec: the job, whose model is one of PEFT's.
        folder: receives the adapter and its configuration.
        average: write averages of the parameters in their place.

    Raises:
        UsageError: ``folder`` names a file.
        CheckpointError: the folder cannot be written, or the adapter is of a kind that holds more than was trained.
        FleetError: a worker vanished meanwhile.
    """
    if folder.suffix == ".safetensors":
        raise UsageError(f"trainer.export({str(folder)!r}): an adapter needs its configuration. Name a folder.")
    adapter = AdapterFolder(spec)
    own = gather_model(generation, spec.partitioned, wanted=adapter.wants, average=average)
    if own is not None:
        write_tensors(adapter.tensors(own), folder / ADAPTER, {"format": "pt"})
        adapter.write_config(folder)


class AdapterForm:
    """A publication of an adapter: parts of what was trained become one file, beside the adapter's configuration."""

    def __init__(self, spec: JobSpec) -> None:
        """Build the model without data, now: it is the user's code.

        Args:
            spec: the job, whose model is one of PEFT's.
        """
        self._folder = AdapterFolder(spec)
        self.wants = self._folder.wants
        self.metadata: Mapping[str, str] = {}

    def file_of(self, part: int, parts: int) -> str:
        """Return a name that PEFT does not look at."""
        return f".part-{part}.safetensors"

    def complete(self, folder: Path, files: Sequence[str]) -> None:
        """Join the parts.

        Raises:
            CheckpointError: this kind of adapter needs more than what was trained.
            OSError: the folder cannot be written.
        """
        own = {name: value for file in files for name, value in load_file(folder / file).items()}
        write_tensors(self._folder.tensors(own), folder / ADAPTER, {"format": "pt"})
        self._folder.write_config(folder)
        for file in files:
            (folder / file).unlink()


class AdapterFolder:
    """The contents of a folder with one adapter: tensors by PEFT's names, and ``adapter_config.json``."""

    def __init__(self, spec: JobSpec) -> None:
        """Build the model without data.

        Args:
            spec: the job, whose model is one of PEFT's.

        Raises:
            CheckpointError: PEFT cannot save this kind of adapter from the model's parameters and buffers.
        """
        mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        built = build_without_data(spec.built, mode)
        model: Any = built.module
        self._model, self._adapter = model, str(model.active_adapter)
        self._base = None if spec.weights is None else Path(spec.weights.path)
        every = model.state_dict(keep_vars=True)
        saved = {id(value) for value in self._found(every).values()}
        self._same = {name: id(value) for name, value in every.items() if id(value) in saved}
        """by name, a number that other names of the same tensor have, too"""
        self._names = self._same.keys() | spec.partitioned.trainable
        given = dict(spec.model.module.named_parameters()) if isinstance(spec.model, GivenModel) else {}
        first = {**built.buffers, **given}
        self._unused = {name: value.detach() for name, value in first.items() if name in self._names}
        """entries of no section, which stay as the script has built them"""

    def wants(self, path: str) -> bool:
        """Return whether an entry of a section's state belongs to the adapter; some of its layers may be frozen."""
        kind, _, name = path.partition("/")
        return kind in ("parameters", "buffers") and name in self._names

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the adapter's tensors.

        Args:
            own: what it wants, by the model's own names.

        Raises:
            CheckpointError: PEFT needs more than that.
        """
        every = {**self._unused, **own}
        tensors = {self._same[name]: value for name, value in every.items() if name in self._same}
        every |= {name: tensors[same] for name, same in self._same.items() if same in tensors}
        return {name: value.contiguous() for name, value in self._found(every).items()}

    def _found(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        try:
            found: dict[str, Tensor] = get_peft_model_state_dict(
                self._model, state_dict=dict(own), adapter_name=self._adapter, save_embedding_layers=False
            )
        except (KeyError, ValueError) as error:
            kind = self._model.peft_config[self._adapter].peft_type
            raise CheckpointError(
                f"an adapter of the kind {kind} cannot be exported: PEFT says {error}. Use "
                "LoRA, or an option of this kind that asks for less."
            ) from error
        return found

    def write_config(self, folder: Path) -> None:
        """Write ``adapter_config.json``, which names the base."""
        config = copy.deepcopy(self._model.peft_config[self._adapter])
        config.inference_mode = True
        if not config.base_model_name_or_path and self._base is not None:
            config.base_model_name_or_path = str(self._base)
        config.save_pretrained(str(folder))

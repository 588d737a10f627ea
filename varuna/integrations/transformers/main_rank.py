"""Work of Hugging Face's Trainer with the whole model, on the one rank that has it: evaluate, predict, save."""

import io
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import transformers
from transformers.trainer_utils import PredictionOutput

import varuna
from varuna.checkpoint.io.export import is_exported
from varuna.core.errors import FleetError, LinkError
from varuna.engine.worker.export import gather_model, spread_model
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.tell import tell_all
from varuna.job.built import GivenModel, fill_module
from varuna.job.training import Training
from varuna.partition.model import PartitionedModel

_ARRAY, _TUPLE = "__array__", "__tuple__"


def pack(value: Any) -> bytes:
    """Pack any nesting of dicts, lists, tuples, arrays, numbers and text; tuples with names lose them."""
    arrays: list[np.ndarray[Any, Any]] = []

    def plain(each: Any) -> Any:
        if isinstance(each, np.ndarray):
            arrays.append(each)
            return {_ARRAY: len(arrays) - 1}
        if isinstance(each, Mapping):
            return {key: plain(item) for key, item in each.items()}
        if isinstance(each, tuple):
            return {_TUPLE: [plain(item) for item in each]}
        if isinstance(each, list):
            return [plain(item) for item in each]
        return each.item() if isinstance(each, np.generic) else each

    tree = json.dumps(plain(value))
    written = io.BytesIO()
    np.savez(written, tree=np.array(tree), allow_pickle=False, **{f"a{i}": each for i, each in enumerate(arrays)})
    return written.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that was packed."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:

        def original(each: Any) -> Any:
            if isinstance(each, dict):
                if _ARRAY in each:
                    return stored[f"a{each[_ARRAY]}"]
                if _TUPLE in each:
                    return tuple(map(original, each[_TUPLE]))
                return {key: original(item) for key, item in each.items()}
            return list(map(original, each)) if isinstance(each, list) else each

        return original(json.loads(str(stored["tree"])))


Found = TypeVar("Found")

IS_LAUNCHED = "VARUNA_MANAGER" in os.environ
"""Whether this is one of a run's workers: which one prints and writes is known after its first step."""

_Base: Any = transformers.Trainer if TYPE_CHECKING else object


class OnMainRank(_Base):
    """Gathers the model on the main rank, works with it there, and tells the others what came of it."""

    model: Any
    state: Any
    control: Any
    data_collator: Any
    _is_main = not IS_LAUNCHED
    _training: Training | None = None
    _job: varuna.Trainer | None = None
    _generation = 0
    _told = 0
    """number of the newest message"""
    _at: tuple[int, int] | None = None
    """the generation and step whose values the model has"""
    _is_alone = False
    """the main rank works by itself"""

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """Do what Hugging Face's Trainer does, on the main rank with the whole model; call it on every rank.

        Returns:
            The metrics, on every rank; nothing if a morph interrupted it during training.
        """
        found: dict[str, float] = self._on_main(lambda: super(OnMainRank, self).evaluate(*args, **named)) or {}
        return found

    def predict(self, *args: Any, **named: Any) -> Any:
        """Do what Hugging Face's Trainer does, on the main rank with the whole model; call it on every rank."""
        found: Any = self._on_main(lambda: tuple(super(OnMainRank, self).predict(*args, **named)))
        return PredictionOutput(*found)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model from the main rank; call it on every rank."""
        self._gather()
        if self._is_main:
            with self._writes_model():  # it notes the dtype in the model's config
                super().save_model(output_dir, _internal_call)

    def is_world_process_zero(self) -> bool:
        """Return whether this is the worker that prints and writes; that may become another one."""
        return self._is_main

    def is_local_process_zero(self) -> bool:
        """Return the same as ``is_world_process_zero``."""
        return self._is_main

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model in host memory: devices hold stages."""

    def _on_main(self, work: Callable[[], Found]) -> Found | None:
        """Run ``work`` with the trained model on the main rank, and tell all ranks what it returns."""
        if self._is_alone:
            return work()
        self._gather()
        if self._training is None:
            return self._on_device(work)
        before = len(self.state.log_history)
        found = self._on_device(work) if self._is_main or self._training.is_alone else None
        logged = self.state.log_history[before:]
        if self._training.is_alone:
            return found
        told: Any = self._tell((found, logged) if self._is_main else None, "an evaluation on the main rank")
        if told is None:
            return None
        result, history = told
        if not self._is_main:
            self.state.log_history += history
        return result  # type: ignore[no-any-return]

    def _on_device(self, work: Callable[[], Found]) -> Found:
        self._is_alone = True
        with self._writes_model():
            try:
                self.model.to(self.args.device)
                return work()
            finally:
                self._is_alone = False
                self.model.to("cpu").train()

    def _writes_model(self) -> AbstractContextManager[None]:
        """Give the model values or another place in this block, which is not the script's doing."""
        return nullcontext() if self._job is None else self._job._handed.unwatched()

    def _gather(self) -> None:
        """Give the main rank's model the run's values, unless it has them."""
        training, job = self._training, self._job
        if training is None or job is None or training.session.current is None:
            return
        now = (self._generation, self.state.global_step)
        if self._at == now:
            return
        found = training.run_between_steps(partial(_gathered, model=job._spec.partitioned), "gathers the model")
        if found is not None:
            with self._writes_model():
                fill_module(self.model, found)
        self._at = now

    def _take_trained(self) -> None:
        """Give the model the trained values on every rank, after the last step, for what the script does next."""
        training, job = self._training, self._job
        if training is None or job is None or training.session.current is None:
            return
        given, model = job._spec.model, job._spec.partitioned
        assert isinstance(given, GivenModel)
        spread = partial(spread_model, model=model, wanted=partial(given.wants, model.changing))
        if (found := training.run_between_steps(spread, "gets the trained model")) is not None:
            with self._writes_model():
                fill_module(self.model, found)
            self._at = (self._generation, self.state.global_step)

    def _tell(self, value: Any, what: str) -> Any:
        """Spread the main rank's value to all; return None if a morph interrupted that."""
        training = self._training
        if training is None:
            return value
        self._told += 1
        key = ("transformers", self._told)

        def tell(generation: Generation) -> bytes:
            if generation.plan.workers == 1:
                return pack(value)
            return tell_all(generation, key, pack(value) if self._is_main else None, what)

        told = training.run_between_steps(tell, what)
        return None if told is None else unpack(told)


def _gathered(generation: Generation, model: PartitionedModel) -> dict[str, torch.Tensor] | None:
    try:
        return gather_model(generation, model, wanted=is_exported)
    except FleetError as error:  # a loss that the run survives
        raise LinkError(str(error)) from error

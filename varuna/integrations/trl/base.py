"""Base of both of TRL's trainers: it says what is refused, in which words, and when TRL's fused head computes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import transformers
from torch import nn
from transformers.utils.versions import require_version

from varuna.core.errors import UsageError
from varuna.integrations.pretrained.adapters import check_matched
from varuna.integrations.pretrained.folder import config_of
from varuna.integrations.transformers.overrides import by_name, library_of
from varuna.integrations.transformers.trainer import OverVaruna
from varuna.membership.launched import watch_exceptions

_BOTH = """model_init_kwargs trust_remote_code dataset_num_proc max_length truncation_mode padding_free
    pad_to_multiple_of pad_token router_aux_loss_coef"""
PREPARING = frozenset(_BOTH.split())
"""Fields of both that TRL's own code uses before training, or that leave the loss as it is."""


def check_fields(config: Any, used: Set[str], known: Mapping[str, Set[object]]) -> None:
    """Refuse, by name, every field of TRL's own that is set and cannot be honoured.

    Args:
        config: an ``SFTConfig`` or a ``DPOConfig``.
        used: the names of those that are.
        known: of some of them, which values are.

    Raises:
        UsageError: there is one.
    """
    library = next(kind for kind in type(config).__mro__ if kind.__module__.startswith("trl."))
    inherited = {each.name for each in dataclasses.fields(library.__mro__[1])}
    own = [each for each in dataclasses.fields(library) if each.name not in inherited]
    refused = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in own
        if field.name not in used | PREPARING and getattr(config, field.name) != _default(field)
    ]
    for name, values in known.items():
        found = getattr(config, name)
        if not set(found if isinstance(found, list) else [found]) <= values:
            refused.append(f"{name}={found!r} (known: {', '.join(map(repr, sorted(values, key=str)))})")
    if refused:
        raise UsageError(
            f"varuna.integrations.trl cannot do what {', '.join(refused)} asks for. Leave it out, or train with "
            "varuna.Trainer itself: docs/recipes.md has the same as scripts."
        )


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


require_version("trl>=1.16,<2", "Install it with: pip install 'varuna-train[trl]'")

_Base: Any = OverVaruna if TYPE_CHECKING else object


class OfTrl(_Base):
    """A trainer of TRL's whose loss is computed without its fused head and its metrics, which cannot be captured."""

    used: ClassVar[Set[str]]
    """fields of its configuration, beside those of both, that mean here what they mean to TRL"""
    known: ClassVar[Mapping[str, Set[object]]]
    """values of some of them that do"""

    train_dataset: Any
    aux_loss_enabled: bool

    def __init__(self, *given: Any, **named: Any) -> None:
        """Take the arguments of TRL's trainer.

        Args:
            given: as there.
            named: as there, and ``varuna={...}``: further arguments of ``varuna.Trainer``.

        Raises:
            UsageError: a field cannot be honoured, or the model, the adapters or the samples cannot be used.
        """
        watch_exceptions()  # what is refused is told without our frames
        told = by_name(type(self), given, named)
        self._check_told(told)
        with _in_words(told.get("peft_config")):
            super().__init__(**told)
        self._check_made()
        self._fused = vars(self._head).pop("forward")

    def _check_told(self, told: Mapping[str, Any]) -> None:
        """Refuse what would not be trained as TRL trains it, before TRL loads a model."""
        theirs = library_of(type(self))
        for name in ("compute_loss", "_compute_loss"):
            if getattr(type(self), name, None) is not getattr(theirs, name, None):
                raise UsageError(
                    f"{type(self).__name__} overrides {name}() of TRL's {theirs.__name__}, which cannot be captured. "
                    "Train with varuna.integrations.transformers.Trainer, whose compute_loss() may be overridden."
                )
        for name, instead in _REFUSED.items():
            if told.get(name) is not None:
                raise UsageError(f"{name} is not supported with TRL's trainers: {instead}")
        if type(told.get("args")).__module__.startswith("trl."):
            check_fields(told["args"], self.used, self.known)
        model = told.get("model")
        if isinstance(model, str) and Path(model).is_dir():
            config_of(model, transformers.AutoModelForCausalLM)

    def _check_made(self) -> None:
        if self.aux_loss_enabled:
            raise UsageError(
                "the loss would have the balancing loss of the model's routers, which is of each micro-batch, not of a "
                "sample. Set router_aux_loss_coef=0.0; docs/recipes.md has a mixture of experts with that loss."
            )
        if self._is_vision_dataset:
            raise UsageError("samples with images are not supported. docs/recipes.md has them as a script.")
        adapters = getattr(self.model, "peft_config", {})
        if any(each.is_prompt_learning for each in adapters.values()):
            raise UsageError("adapters that add tokens to the prompt are not supported. Train LoRA (LoraConfig).")
        if not hasattr(self.train_dataset, "__len__"):
            raise UsageError("a dataset that is read as a stream has no length to pad rows to. Load it whole.")
        if not len(self.train_dataset):
            raise UsageError(
                "all labels are masked: no sample has anything to learn within max_length. Look at the roles of the "
                "messages and at the chat template, or take a larger max_length."
            )

    @property
    def _head(self) -> nn.Module:
        """Find the module that TRL gives its fused head: as an attribute, which copies of the model would share."""
        base: Any = getattr(self.model, "get_base_model", None)
        return self.model if base is None else base()  # type: ignore[no-any-return]

    def _on_device(self, work: Callable[[], Any]) -> Any:
        def with_fused() -> Any:
            vars(self._head)["forward"] = self._fused
            try:
                return work()
            finally:
                del vars(self._head)["forward"]

        return super()._on_device(with_fused)


def rounded_up(length: int, multiple: int | None) -> int:
    """Return the next multiple, as TRL's collators pad to one."""
    return -(-length // (multiple or 1)) * (multiple or 1)


_REFUSED = {
    "data_collator": "rows are joined to one length here. Prepare the samples before, or use "
    "varuna.integrations.transformers.Trainer, which takes any collator.",
    "quantization_config": "docs/recipes.md has quantized models as scripts.",
}
"""Arguments, and what to do instead."""


@contextmanager
def _in_words(adapter: Any) -> Iterator[None]:
    from jinja2 import TemplateError

    try:
        yield
    except TemplateError as error:
        raise UsageError(
            f"the chat template fails on a sample: {error}. Messages are "
            '{"role": ..., "content": ...} in an order that the template knows.'
        ) from error
    except ValueError as error:
        check_matched(error, adapter)
        raise

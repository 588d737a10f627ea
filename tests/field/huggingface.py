"""Jobs of transformers: every class in its auto mappings for heads that are trained."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from tests.field import wrapped
from tests.field.exceptions import CONFIGS
from tests.field.forms import candidates, drawn
from tests.field.jobs import MOST_PARAMETERS, Attempt, Job, Prepared, quiet
from tests.field.samples import CLASSES, Drawn, Shapes
from tests.field.shrink import changed, tiny

HEADS = {
    "CAUSAL_LM": "tokens",
    "MASKED_LM": "tokens",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "PRETRAINING": "pretraining",
    "SEQUENCE_CLASSIFICATION": "class",
    "IMAGE_CLASSIFICATION": "image",
    "AUDIO_CLASSIFICATION": "class",
    "VIDEO_CLASSIFICATION": "video",
    "TOKEN_CLASSIFICATION": "tags",
    "QUESTION_ANSWERING": "span",
    "MULTIPLE_CHOICE": "choice",
    "NEXT_SENTENCE_PREDICTION": "next",
    "SEMANTIC_SEGMENTATION": "pixels",
    "MASKED_IMAGE_MODELING": "masked image",
    "CAUSAL_IMAGE_MODELING": "tokens",
    "CTC": "ctc",
    "SPEECH_SEQ_2_SEQ": "tokens",
    "IMAGE_TEXT_TO_TEXT": "tokens",
    "MULTIMODAL_LM": "tokens",
    "AUDIO_FRAME_CLASSIFICATION": "frames",
    "AUDIO_XVECTOR": "class",
    "DOCUMENT_QUESTION_ANSWERING": "span",
    "VISUAL_QUESTION_ANSWERING": "tokens",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "pair",
    "TIME_SERIES_PREDICTION": "series",
    "TIME_SERIES_CLASSIFICATION": "series",
    "TIME_SERIES_REGRESSION": "series",
    "OBJECT_DETECTION": "boxes",
    "ZERO_SHOT_OBJECT_DETECTION": "boxes",
    "IMAGE_SEGMENTATION": "masks",
    "INSTANCE_SEGMENTATION": "masks",
    "UNIVERSAL_SEGMENTATION": "masks",
    "DEPTH_ESTIMATION": "dense",
    "NORMAL_ESTIMATION": "dense",
    "POINTMAP_ESTIMATION": "dense",
    "POSE_ESTIMATION": "dense",
    "IMAGE_MATTING": "dense",
    "IMAGE_TO_IMAGE": "dense",
    "KEYPOINT_DETECTION": "dense",
    "KEYPOINT_MATCHING": "dense",
    "TABLE_QUESTION_ANSWERING": "cells",
    "RNNT": "ctc",
    "TDT": "ctc",
    "TEXT_TO_SPECTROGRAM": "speech",
    "TEXT_TO_WAVEFORM": "speech",
}
"""Auto mappings, and what a sample of each has to learn from; a class that stands in several belongs to the first.

Left out are those whose classes take no targets at all: backbones, encoders, retrieval of masks and tables.
"""


@cache
def jobs() -> tuple[Job, ...]:
    """All, family by family."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], Job] = {}
    for head, kind in HEADS.items():
        for family, models in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            for model in [models] if isinstance(models, str) else models:
                found.setdefault((family, model), Job("transformers", family, model, kind))
    return tuple(found.values())


def config_of(family: str, model: str, kind: str, kept: tuple[str, ...] = ()) -> Any:
    """A tiny configuration of a family, but for the fields that are kept."""
    exceptions = CONFIGS.get(family, {})
    config = tiny(_default(family, model), exceptions, kept)
    config.num_labels = _ANSWERS.get(kind, CLASSES)
    config.problem_type = "single_label_classification"
    config.use_cache = False
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 2
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 2
    return config


_ANSWERS = {"span": 2, "next": 2}
"""Outputs of heads that have no classes: the beginning and the end of an answer."""


def _default(family: str, model: str) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = getattr(transformers, model).config_class or CONFIG_MAPPING[family]
    return made(**CONFIGS.get(family, {}).get("before", {}))


def builder(
    job: Job, kept: tuple[str, ...] = (), around: Callable[[nn.Module], nn.Module] | None = None
) -> Callable[[], nn.Module]:
    """Builds the unmodified model, and what a user has to write around it."""
    import transformers

    def build() -> nn.Module:
        module: nn.Module = getattr(transformers, job.model)(config_of(job.family, job.model, job.kind, kept))
        return quiet(around(module) if around else module)

    return build


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """Builder and dataset, for each way to make samples.

    First of the smallest configuration. Where its fields contradict each other, being small, one of them is left as it
    is; then all of them, so that only depth and vocabulary are small.
    """
    import transformers

    job = attempt.job
    model = getattr(transformers, job.model)
    fields = changed(_default(job.family, job.model))
    for kept in ((), *((field,) for field in fields), fields):
        try:
            if kept:
                _check_size(job, kept)
            config = config_of(job.family, job.model, job.kind, kept)
            shapes_of = candidates(model, builder(job, kept), config, job.kind, even=attempt.even)
            for shapes in shapes_of if len(kept) != 1 else islice(shapes_of, _TRIES_OF_ONE):
                yield Prepared(builder(job, kept, _around(shapes)), Drawn(drawn(shapes)), otherwise=bool(kept))
        except Exception as error:
            yield Prepared(partial(_fail, error), Drawn(_nothing), otherwise=bool(kept))


_TRIES_OF_ONE = 2


def _check_size(job: Job, kept: tuple[str, ...]) -> None:
    """Before any of it is allocated.

    Raises:
        ValueError: it is too large for a sweep.
    """
    with torch.device("meta"):
        module = builder(job, kept)()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters: too large for a sweep")


def _fail(error: Exception) -> nn.Module:
    raise error


def _nothing(index: int) -> dict[str, Any]:
    raise IndexError(index)


def _around(shapes: Shapes) -> Callable[[nn.Module], nn.Module] | None:
    """Choose a wrapper for a model that wants something else than samples of tensors; None: it needs none."""
    takes = shapes.takes
    if shapes.form == "grid":
        return wrapped.Packed
    if shapes.kind == "pair":
        return wrapped.ReturnsLoss if "pixel_values" in takes else wrapped.ReturnsVideoLoss
    if shapes.variant == "rows of codes":
        return wrapped.Rows
    if shapes.kind == "masks" and "task_inputs" in takes:
        return wrapped.SegmentsForTask
    if shapes.kind == "masks":
        return wrapped.Segments if "mask_labels" in takes else wrapped.DetectsMasks
    if shapes.kind == "boxes":
        return wrapped.DetectsNamed if "input_ids" in takes else wrapped.Detects
    return None

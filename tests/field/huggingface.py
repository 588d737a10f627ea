"""Jobs of transformers: every class in its auto mappings for heads that are trained."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from torch import nn

from tests.field.exceptions import CONFIGS
from tests.field.jobs import Attempt, Job, Prepared, quiet
from tests.field.samples import CLASSES, Drawn, Shapes, candidates
from tests.field.shrink import tiny

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
}
"""Auto mappings, and what a sample of each has to learn from; a class that stands in several belongs to the first."""


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


def config_of(family: str, model: str, kind: str) -> Any:
    """A tiny configuration of a family."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    exceptions = CONFIGS.get(family, {})
    made = getattr(transformers, model).config_class or CONFIG_MAPPING[family]
    config = tiny(made(**exceptions.get("before", {})), exceptions)
    config.num_labels = _ANSWERS.get(kind, CLASSES)
    config.problem_type = "single_label_classification"
    config.use_cache = False
    for part in (config, *(value for value in vars(config).values() if hasattr(value, "model_type"))):
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 2
    return config


_ANSWERS = {"span": 2, "next": 2}
"""Outputs of heads that have no classes: the beginning and the end of an answer."""


class ReturnsLoss(nn.Module):
    """Models of pairs compute their loss on demand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, pixel_values: Any, attention_mask: Any = None) -> Any:
        return self.model(
            input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, return_loss=True
        ).loss


def builder(job: Job) -> Callable[[], nn.Module]:
    """Builds the unmodified model."""
    import transformers

    def build() -> nn.Module:
        module: nn.Module = getattr(transformers, job.model)(config_of(job.family, job.model, job.kind))
        return quiet(ReturnsLoss(module) if job.kind == "pair" else module)

    return build


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """Builder and dataset, for each way to make samples."""
    build = builder(attempt.job)
    module = build()
    config = config_of(attempt.job.family, attempt.job.model, attempt.job.kind)
    for shapes in candidates(module, config, attempt.job.kind, even=attempt.even):
        yield Prepared(build, Drawn(shapes.sample))


def shapes_of(attempt: Attempt) -> list[Shapes]:
    """For a look at what is derived."""
    module = builder(attempt.job)()
    return list(
        candidates(
            module,
            config_of(attempt.job.family, attempt.job.model, attempt.job.kind),
            attempt.job.kind,
            even=attempt.even,
        )
    )

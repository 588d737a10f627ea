"""Modules that users write around a model whose ``forward`` wants more than a tensor for each name.

Samples are dicts of tensors of one shape each, which are stacked. These modules, which are trained, make of
them what a model wants in another form.
"""

from typing import Any

from torch import Tensor, nn


class _Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class ReturnsLoss(_Around):
    """Models of pairs compute their loss on demand."""

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.model(
            input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask, return_loss=True
        ).loss


class ReturnsVideoLoss(_Around):
    """The same for videos."""

    def forward(self, input_ids: Tensor, pixel_values_videos: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.model(
            input_ids=input_ids,
            pixel_values_videos=pixel_values_videos,
            attention_mask=attention_mask,
            return_loss=True,
        ).loss


class Detects(_Around):
    """A detector wants a dict for each picture, with as many boxes as there are."""

    def forward(self, pixel_values: Tensor, class_labels: Tensor, boxes: Tensor) -> Any:
        seen = zip(class_labels.unbind(), boxes.unbind(), strict=True)
        return self.model(pixel_values=pixel_values, labels=[{"class_labels": c, "boxes": b} for c, b in seen]).loss


class DetectsMasks(_Around):
    """Likewise, with an outline of each thing in a box."""

    def forward(self, pixel_values: Tensor, class_labels: Tensor, boxes: Tensor, masks: Tensor) -> Any:
        seen = zip(class_labels.unbind(), boxes.unbind(), masks.unbind(), strict=True)
        labels = [{"class_labels": c, "boxes": b, "masks": m} for c, b, m in seen]
        return self.model(pixel_values=pixel_values, labels=labels).loss


class DetectsNamed(_Around):
    """A detector that is told in words what to look for."""

    def forward(self, pixel_values: Tensor, input_ids: Tensor, class_labels: Tensor, boxes: Tensor) -> Any:
        seen = zip(class_labels.unbind(), boxes.unbind(), strict=True)
        labels = [{"class_labels": c, "boxes": b} for c, b in seen]
        return self.model(pixel_values=pixel_values, input_ids=input_ids, labels=labels).loss


class Segments(_Around):
    """Two lists with a tensor for each picture."""

    def forward(self, pixel_values: Tensor, class_labels: Tensor, masks: Tensor) -> Any:
        return self.model(
            pixel_values=pixel_values, mask_labels=list(masks.unbind()), class_labels=list(class_labels.unbind())
        ).loss


class SegmentsForTask(_Around):
    """The same with the task, in words."""

    def forward(self, pixel_values: Tensor, task_inputs: Tensor, class_labels: Tensor, masks: Tensor) -> Any:
        return self.model(
            pixel_values=pixel_values,
            task_inputs=task_inputs,
            mask_labels=list(masks.unbind()),
            class_labels=list(class_labels.unbind()),
        ).loss


class Rows(_Around):
    """Codes of sound, of which each codebook has a row of its own in the batch."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids.flatten(0, 1), labels=labels).loss


class Packed(_Around):
    """Patches of all pictures of a batch in one row after another, with the grid that each picture is."""

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> Any:
        kinds = {} if mm_token_type_ids is None else {"mm_token_type_ids": mm_token_type_ids}
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values.flatten(0, 1),
            image_grid_thw=image_grid_thw,
            labels=labels,
            **kinds,
        ).loss

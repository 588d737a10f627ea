"""Targets that a sample has to learn, for each kind of head."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.field.samples import CLASSES, IGNORED, Shapes, find, generator_of
from tests.field.shrink import LENGTH

Sample = dict[str, Tensor]
_THINGS = 2
"""In a picture of a detector's."""


def sample(shapes: Shapes, index: int) -> Sample:
    """One sample of the dataset."""
    return _TARGETS[shapes.kind](shapes, index)


def _drawn_class(index: int, *size: int) -> Tensor:
    return torch.randint(0, CLASSES, size, generator=generator_of(index))


def _tokens(shapes: Shapes, index: int) -> Sample:
    if shapes.variant == "rows of codes":
        size = (int(find(shapes.config, "num_codebooks", default=1)), shapes.length)
        codes = torch.randint(0, shapes.codes, size, generator=generator_of(index))
        return {"input_ids": codes, "labels": codes.T.clone()}
    found = shapes.sources(index)
    if "input_ids" in found and "input_values" not in found and ("input_features" not in found or shapes.places):
        labels = shapes.labels_of(found)
    else:
        labels = shapes.tokens(index + 500, shapes.length)
    if "decoder_input_ids" in shapes.takes and shapes.variant == "decoder too":
        found["decoder_input_ids"] = labels.clamp(min=0)
    return {**found, "labels": labels}


def _class(shapes: Shapes, index: int) -> Sample:
    name = "labels" if "labels" in shapes.takes or "target_values" not in shapes.takes else "target_values"
    return {**shapes.sources(index), name: _drawn_class(index)}


def _next(shapes: Shapes, index: int) -> Sample:
    name = "labels" if "labels" in shapes.takes else "next_sentence_label"
    return {**shapes.sources(index), name: torch.tensor(index % 2)}


def _pretraining(shapes: Shapes, index: int) -> Sample:
    if "mask_time_indices" in shapes.takes:
        return _contrasted(shapes, index)
    if "pixel_values" in shapes.takes and "input_ids" not in shapes.takes:
        hidden = {"bool_masked_pos": shapes.hidden_patches(index)} if "bool_masked_pos" in shapes.takes else {}
        return {**shapes.sources(index), **hidden}
    found = _tokens(shapes, index)
    for name in ("next_sentence_label", "sentence_order_label"):
        if name in shapes.takes:
            found[name] = torch.tensor(index % 2)
    if "question_positions" in shapes.takes:
        del found["labels"]
        found["question_positions"] = torch.tensor([1])
        for name in ("start_positions", "end_positions"):
            found[name] = torch.randint(0, shapes.length // 2, (1,), generator=generator_of(index))
    if shapes.variant == "tags":
        found["labels"] = torch.randint(0, 2, found["input_ids"].shape, generator=generator_of(index))
    if "visual_embeds" in found:
        seen = torch.full((len(found["visual_embeds"]),), IGNORED)
        found["labels"] = torch.cat([found["labels"], seen])
    if "labels" not in shapes.takes:
        found.pop("labels", None)
    return found


def _contrasted(shapes: Shapes, index: int) -> Sample:
    """Frames of sound that are hidden, and for each frame others of the same sound that it is told from."""
    frames = shapes.frames
    hidden = torch.zeros(frames, dtype=torch.bool)
    hidden[torch.randperm(frames, generator=generator_of(index))[: frames // 2]] = True
    negatives = int(find(shapes.config, "num_negatives", default=4))
    others = torch.randint(0, frames, (frames, negatives), generator=generator_of(index + 500))
    return {**shapes.sources(index), "mask_time_indices": hidden, "sampled_negative_indices": others}


def _tags(shapes: Shapes, index: int) -> Sample:
    found = shapes.sources(index)
    labels = _drawn_class(index, *found["input_ids"].shape)
    labels[shapes.labels_of(found) == IGNORED] = IGNORED
    return {**found, "labels": labels}


def _cells(shapes: Shapes, index: int) -> Sample:
    """Of a table, some are the answer; every word has its row and column, and five more properties."""
    found = shapes.sources(index)
    words = len(found["input_ids"])
    kinds = torch.zeros(words, 7, dtype=torch.long)
    table = torch.arange(words) >= words // 4
    kinds[:, 0] = table
    kinds[table, 1], kinds[table, 2] = 1 + torch.arange(int(table.sum())) % 3, 1 + torch.arange(int(table.sum())) // 3
    return {**found, "token_type_ids": kinds, "labels": (kinds[:, 1] == 1 + index % 3).long()}


def _span(shapes: Shapes, index: int) -> Sample:
    first, last = torch.randint(0, shapes.length // 2, (2,), generator=generator_of(index)).sort().values
    return {**shapes.sources(index), "start_positions": first, "end_positions": last + 1}


def _choice(shapes: Shapes, index: int) -> Sample:
    each = [shapes.sources(4 * index + choice) for choice in range(3)]
    found = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    return {**found, "labels": torch.tensor(index % 3)}


def _pixels(shapes: Shapes, index: int) -> Sample:
    return {**shapes.sources(index), "labels": _drawn_class(index, *shapes.side)}


def _masked_image(shapes: Shapes, index: int) -> Sample:
    return {**shapes.sources(index), "bool_masked_pos": shapes.hidden_patches(index)}


def _ctc(shapes: Shapes, index: int) -> Sample:
    labels = shapes.tokens(index, 3)
    found = {**shapes.sources(index), "labels": labels}
    if "decoder_input_ids" in shapes.takes and shapes.variant != "bins last alone":
        blank = int(find(shapes.config, "blank_token_id", "pad_token_id", default=0))
        found["decoder_input_ids"] = torch.cat([torch.tensor([blank]), labels])
    return found


def _frames(shapes: Shapes, index: int) -> Sample:
    labels = nn.functional.one_hot(_drawn_class(index, shapes.frames), CLASSES)
    return {**shapes.sources(index), "labels": labels}


def _series(shapes: Shapes, index: int) -> Sample:
    config, generator = shapes.config, generator_of(index)
    takes = shapes.takes
    lags = find(config, "lags_sequence", default=[0])
    long = int(find(config, "context_length", default=LENGTH))
    ahead = int(find(config, "prediction_length", "horizon_length", default=8) or 8)
    channels = int(find(config, "num_input_channels", "input_size", default=1))
    found: Sample = {}
    if "past_time_features" in takes:
        past = long + max(lags)
        features = int(find(config, "num_time_features", default=0))
        shape = () if channels == 1 else (channels,)
        found["past_values"] = torch.randn(past, *shape, generator=generator)
        found["past_time_features"] = torch.randn(past, features, generator=generator)
        found["past_observed_mask"] = torch.ones(past, *shape)
        found["future_values"] = torch.randn(ahead, *shape, generator=generator)
        found["future_time_features"] = torch.randn(ahead, features, generator=generator)
        return found
    of_each = () if shapes.variant == "alone" else (channels,)
    found["past_values"] = torch.randn(long, *of_each, generator=generator)
    if "future_values" in takes:
        found["future_values"] = torch.randn(ahead, *of_each, generator=generator)
    if "target_values" in takes:
        targets = int(find(config, "num_targets", default=CLASSES))
        is_class = shapes.variant == "class"
        found["target_values"] = (
            torch.tensor(index % targets) if is_class else torch.randn(targets, generator=generator)
        )
    return found


def _pair(shapes: Shapes, index: int) -> Sample:
    name = "pixel_values" if "pixel_values" in shapes.takes else "pixel_values_videos"
    return {**shapes.text(index), name: shapes.picture(index)}


def _boxes(shapes: Shapes, index: int) -> Sample:
    """Centres and sizes, as shares of the picture."""
    words = {"input_ids": _named(shapes, index)} if "input_ids" in shapes.takes else {}
    corners = torch.rand(_THINGS, 4, generator=generator_of(index))
    boxes = torch.cat([0.3 + 0.4 * corners[:, :2], 0.1 + 0.3 * corners[:, 2:]], dim=1)
    return {
        "pixel_values": shapes.picture(index),
        **words,
        "class_labels": _drawn_class(index, _THINGS),
        "boxes": boxes,
    }


def _named(shapes: Shapes, index: int) -> Tensor:
    """Names of what to look for: between full stops where those are in the vocabulary, as BERT numbers them."""
    if shapes.vocabulary <= _STOP:
        return shapes.tokens(index, shapes.length)
    names = shapes.tokens(index, CLASSES + 1) % 700 + 200
    between = torch.stack([names, torch.full((CLASSES + 1,), _STOP)], dim=1).flatten()
    return torch.cat([torch.tensor([_BEGIN]), between, torch.tensor([_END])])


_BEGIN, _END, _STOP = 101, 102, 1012


def _masks(shapes: Shapes, index: int) -> Sample:
    masks = torch.zeros(_THINGS, *shapes.side)
    for thing, (x, y) in enumerate(torch.randint(0, shapes.side[0] // 2, (_THINGS, 2), generator=generator_of(index))):
        masks[thing, y : y + shapes.side[0] // 2, x : x + shapes.side[1] // 2] = 1
    found = {**_boxes(shapes, index), "masks": masks}
    if "mask_labels" in shapes.takes:
        del found["boxes"]
    if "task_inputs" in shapes.takes:
        found["task_inputs"] = shapes.tokens(index, int(find(shapes.config, "task_seq_len", default=77)))
    return found


def _dense(shapes: Shapes, index: int) -> Sample:
    """A number for each pixel, or as many as the model says."""
    labels = torch.rand(shapes.answer or shapes.side, generator=generator_of(index + 500))
    return {**shapes.sources(index), "labels": 0.1 + labels}


def _speech(shapes: Shapes, index: int) -> Sample:
    """Text to a spectrogram, or to the codes of one."""
    found = shapes.text(index)
    words, frames = len(found["input_ids"]), 2 * len(found["input_ids"])
    bins = int(find(shapes.config, "num_mel_bins", default=16))
    heard = torch.randn(frames, bins, generator=generator_of(index + 500))
    if "spectrogram_labels" in shapes.takes:
        each = torch.randn(words, 1, generator=generator_of(index + 501))
        told = {"spectrogram_labels": heard, "duration_labels": torch.full((words,), 2)}
        return {**found, **told, "pitch_labels": each, "energy_labels": each.flip(0)}
    if "decoder_input_values" in shapes.takes:
        width = int(find(shapes.config, "speaker_embedding_dim", default=16))
        speaker = torch.randn(width, generator=generator_of(index + 501))
        return {**found, "labels": heard, "speaker_embeddings": speaker}
    return {**found, "labels": shapes.labels_of(found)}


_TARGETS: Mapping[str, Callable[[Shapes, int], Sample]] = {
    "tokens": _tokens,
    "pretraining": _pretraining,
    "class": _class,
    "image": _class,
    "video": _class,
    "next": _next,
    "tags": _tags,
    "cells": _cells,
    "span": _span,
    "choice": _choice,
    "pixels": _pixels,
    "masked image": _masked_image,
    "ctc": _ctc,
    "frames": _frames,
    "series": _series,
    "pair": _pair,
    "boxes": _boxes,
    "masks": _masks,
    "dense": _dense,
    "speech": _speech,
}

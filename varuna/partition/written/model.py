"""A partitioned model as bytes: a file of safetensors with its constants, and all else as JSON among their names."""

import json
import zlib

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from varuna.data.sizes import OpenSizes
from varuna.partition.after_step import Following
from varuna.partition.batch_layout import InputLayout
from varuna.partition.cut.split import BufferUpdate, Crossing, SectionGraph, Split
from varuna.partition.graph.captured import TensorKind
from varuna.partition.graph.ranges import Range
from varuna.partition.graph.sample_guards import Conditions
from varuna.partition.loss.terms import Mixing
from varuna.partition.loss.unknown_operations import Trial, TrialValues
from varuna.partition.loss.whole_batch import Leaf, Whole
from varuna.partition.model import PartitionedModel, graph_digest
from varuna.partition.written.graphs import CannotShareError
from varuna.partition.written.values import ValueReader, ValueWriter

_TYPES = (
    *(PartitionedModel, Split, SectionGraph, Crossing, BufferUpdate, Whole, Leaf, Mixing, Trial, TrialValues),
    *(InputLayout, Conditions, Range, Following, TensorKind, OpenSizes),
)
_LENGTH_BYTES = 8
_UNREADABLE = (
    *(zlib.error, SafetensorError, ValidationError, ValueError, TypeError),
    *(LookupError, AttributeError, RuntimeError),  # of other JSON, and what torch says of it
)
_MOST_BYTES = 2**30
"""Of a model that is read, before it was compressed."""


def to_bytes(model: PartitionedModel) -> bytes:
    """Write a model; equal ones give equal bytes.

    Raises:
        CannotShareError: something in the model means nothing to another process: modules that run as written, say.
    """
    writer = ValueWriter(_TYPES)
    written = json.dumps(writer.write(model), separators=(",", ":")).encode()
    try:
        tensors = save(writer.tensors)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CannotShareError(f"a constant cannot be written: {error}") from error
    return zlib.compress(len(written).to_bytes(_LENGTH_BYTES) + written + tensors, level=1)


def from_bytes(data: bytes) -> PartitionedModel:
    """Inverse of ``to_bytes``; what comes back is proved to be the graphs that were captured.

    Raises:
        CannotShareError: they are other bytes, or this process cannot run the model.
    """
    try:
        # bounded: a few bytes of a broken or foreign sender can stand for very many
        whole = zlib.decompressobj().decompress(data, _MOST_BYTES)
        end = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES])
        reader = ValueReader(_TYPES, load(whole[end:]))
        model = reader.read(json.loads(whole[_LENGTH_BYTES:end]))
        if not isinstance(model, PartitionedModel):
            raise CannotShareError("they are no model's bytes")
        for graph in model.graphs:
            if graph_digest(graph.split, graph.shapes) != graph.facts.digest:
                raise CannotShareError("its graphs are not those that were captured")
    except _UNREADABLE as error:
        raise CannotShareError(f"a captured model cannot be read: {error}") from error
    return model

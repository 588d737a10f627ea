"""Ranges of whole numbers of a sample that an embedding or a loss can take: looked at when samples are read.

A token beyond the vocabulary, or a label beyond the classes, is the data's fault. On a GPU it ends the process; on a
CPU it is an error in the middle of a graph. Neither names the sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.core.errors import DataError
from varuna.partition.graph.operations import op_name, sources_of
from varuna.partition.graph.shared_memory import SharedMemory
from varuna.partition.watching.explaining import line_of

_EMBEDDING = "aten::embedding"
_LOSSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::nll_loss2d")
_IGNORED = -100


@dataclass(frozen=True)
class Range:
    """The whole numbers that an operation can take."""

    module: GraphModule
    """``(*inputs, *constants) -> the whole numbers that it takes``"""
    inputs: tuple[str, ...]
    """keys of the batch"""
    constants: tuple[Tensor, ...]
    end: int
    """all numbers are at least 0 and below this"""
    ignored: int | None
    """or this"""
    what: str
    place: str
    """the user's line"""

    def finds(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Numbers that are out of range."""
        found: Tensor = self.module(*[batch[key] for key in self.inputs], *self.constants)
        odd = (found < 0) | (found >= self.end)
        return found[odd if self.ignored is None else odd & (found != self.ignored)]


def ranges_of(
    graph: Graph, owner: GraphModule, inputs: Mapping[str, str], constants: Mapping[str, Tensor]
) -> tuple[Range, ...]:
    """The ranges of a captured graph, for numbers that follow from the samples alone.

    Args:
        graph: as captured.
        owner: holds what it refers to.
        inputs: placeholder -> key of the batch.
        constants: placeholder -> value.
    """
    found: dict[tuple[Node, int], Range] = {}
    memory = SharedMemory(graph)
    for node in graph.nodes:
        name = op_name(node)
        if name == _EMBEDDING:
            numbers, end, ignored = node.args[1], node.args[0].meta["val"].shape[0], None
            what = "an embedding of {end} rows"
        elif name in _LOSSES and not node.args[1].meta["val"].is_floating_point():
            # classes lie along dimension 1, or 0 of a sample without a batch
            numbers, end = node.args[1], node.args[0].meta["val"].shape[min(1, node.args[0].meta["val"].dim() - 1)]
            # (input, target, weight, reduction, 4: ignore_index)
            ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", _IGNORED)
            what = "a loss over {end} classes"
        else:
            continue
        order = sorted(sources_of([numbers]))
        given = [each for each in order if each.op == "placeholder"]
        keys = [each for each in given if each.name in inputs]
        others = [each for each in given if each.name in constants]
        plain = all(isinstance(each.meta.get("val"), Tensor) and not memory.writers(each) for each in order)
        if not isinstance(end, int) or not keys or len(keys) + len(others) < len(given) or not plain:
            continue
        found[numbers, end] = Range(
            GraphModule(owner, _copied(order, (*keys, *others), numbers), class_name="Range"),
            tuple(inputs[each.name] for each in keys),
            tuple(constants[each.name] for each in others),
            end,
            ignored,
            what.format(end=end),
            line_of(node) or "an unknown line",
        )
    return tuple(found.values())


def _copied(order: Sequence[Node], given: Sequence[Node], result: Node) -> Graph:
    made = Graph()
    copies = {each: made.placeholder(each.name) for each in given}
    for each in order:
        if each not in copies:
            copies[each] = made.node_copy(each, lambda source: copies[source])
    made.output(copies[result])
    return made


def check_ranges(ranges: Sequence[Range], batch: Mapping[str, Tensor], indices: Sequence[int]) -> None:
    """Compare a batch with what the model's operations can take.

    Args:
        ranges: of the graph.
        batch: collated samples, on the host.
        indices: of the samples in the dataset.

    Raises:
        DataError: a number is out of range; names the sample.
    """
    for each in ranges:
        if not all(key in batch for key in each.inputs):
            continue
        odd = each.finds(batch)
        if odd.numel():
            # sample by sample only now, to name it: what is in range costs one pass over the batch
            alone = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(len(indices))]
            mine = [index for index, one in zip(indices, alone, strict=True) if each.finds(one).numel()]
            less = "" if each.ignored is None else f", or {each.ignored}, which is left out"
            raise DataError(
                f"dataset[{(mine or list(indices))[0]}] has {int(odd[0])} in {', '.join(map(repr, each.inputs))}, "
                f"which {each.what} takes at {each.place}: it must be at least 0 and below {each.end}{less}. Correct "
                "the sample, or make the table or the number of classes larger (len(tokenizer) counts added tokens, "
                "vocab_size may not)."
            )

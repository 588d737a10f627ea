"""Rewrites a loss of several terms: each is a sum over the micro-batch, divided by a count of the whole batch.

Micro-batches of a step add up their losses and gradients; then they add up to those of the batch::

    captured     a.mean()        + (b * mask).sum() / mask.sum() + weights.norm()
    rewritten    a.sum() / n0    + (b * mask).sum() / n1         + share * weights.norm()

    counter      inputs of a micro-batch             -> leaves that add up     mask.sum()
    finish       leaves of the whole batch           -> n0, n1                 before the first forward that needs them
    share        examples of the micro-batch / those of the batch

A leaf that is a multiple of the number of examples (n0) is not counted, but known. n0, n1 and share are inputs of the
rewritten graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from varuna.data.sizes import PREFIX
from varuna.partition.cut.split import section_graph
from varuna.partition.graph.captured import Capture
from varuna.partition.graph.flow import Flow
from varuna.partition.graph.operations import flat, op_name
from varuna.partition.loss.batch_dimension import BatchConstant, Count, Fixed, Rows, Total, carriers, multiple_of
from varuna.partition.loss.mixing import ADDITIONS, QUOTIENTS, argument
from varuna.partition.loss.mixing_indexing import ADDING
from varuna.partition.loss.mixing_sums import FOUND, LOSSES, MEAN, NONE, TARGETS, over_examples
from varuna.partition.loss.target_count import CannotCountError, call, count_elements, count_targets, fake_mode_of
from varuna.partition.loss.terms import Terms
from varuna.partition.loss.whole_batch import SHARE, Leaf, Whole

aten = torch.ops.aten
_WIDEST = 4096
"""The most numbers that a micro-batch's count may have."""
_OUT_OF_PLACE: dict[Any, Any] = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.add_.Scalar: aten.add.Scalar,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Scalar: aten.div.Scalar,
}


class Splitting:
    """Rewrites one captured graph in place; ``whole`` then says what it must be given."""

    def __init__(self, capture: Capture, terms: Terms) -> None:
        self._capture, self._graph, self._t = capture, capture.graph, terms.tracking
        # an fx graph has all placeholders first: new ones go in front of this op
        self._first = next(node for node in self._graph.nodes if node.op != "placeholder")
        self._numbers: dict[tuple[object, torch.dtype | None], Node] = {}
        self._sources: list[Node] = []
        self._leaves: list[Leaf] = []
        self._counted: list[Node] = []
        self._made: dict[Node, Node] = {}
        self._replaced: list[Node] = []
        self._finish = Graph()
        self._finished: dict[object, Any] = {}
        self._results: list[tuple[str, torch.dtype, Any]] = []
        self._fixed: list[Node] = []
        self._share: Node | None = None

    def rewrite(self) -> None:
        """Rewrite the graph.

        Raises:
            CannotCountError: a divisor cannot be had before the whole batch has been run.
        """
        output = next(node for node in self._graph.nodes if node.op == "output")
        results = list(output.args[0])
        results[0] = self._term(results[0])
        output.args = (tuple(results),)
        # a set has no order, and numbers are named in the order of their use: the same on all workers
        for node in sorted(self._t.fact_users, key=list(self._graph.nodes).index):
            self._use_numbers(node)
        # users first: fx erases no node that is used
        for node in reversed(self._replaced):
            if not node.users:
                self._graph.erase_node(node)
        self._graph.lint()

    # -- terms ---------------------------------------------------------------------------------------------

    def _term(self, node: Node) -> Node:
        if node not in self._made:
            self._made[node] = self._rewritten(node)
        return self._made[node]

    def _rewritten(self, node: Node) -> Node:
        name = op_name(node)
        if any(isinstance(self._t.of(source), Rows) for source in flat(node.args)):
            is_loss = name in LOSSES and argument(node, "reduction", MEAN) == MEAN
            if not is_loss and name != "aten::mean":
                return node
            self._replaced.append(node)
            return self._mean_loss(node) if is_loss else self._mean(node)
        if name in QUOTIENTS and isinstance(self._t.of(node.args[1]), Total):  # drawn: as large for each example
            with self._graph.inserting_before(node.next):
                return self._scaled(node)
        is_sum = name in ADDITIONS or name in ("aten::stack", "aten::cat", "aten::where")
        with self._graph.inserting_after(node):
            copied = self._graph.node_copy(node, lambda source: source)
        copied.target = _OUT_OF_PLACE.get(node.target, node.target)
        with self._graph.inserting_before(copied):
            dtype = node.meta["val"].dtype

            def changed(value: Any, place: int) -> Any:
                if isinstance(value, list | tuple):
                    return type(value)(changed(each, place) for each in value)
                if not isinstance(value, Node):
                    # every micro-batch adds it, so each its share of it. A third argument is alpha, a factor
                    scaled = is_sum and name not in ("aten::stack", "aten::cat", "aten::where") and place < 2
                    return self._scaled(value) if scaled and isinstance(value, int | float) else value
                state = self._t.of(value)
                if isinstance(state, Total):
                    return self._term(value)
                if isinstance(state, BatchConstant):
                    number = self._number(value, dtype)
                    # argument 0 of where is the condition
                    return self._scaled(number) if is_sum and not (name == "aten::where" and place == 0) else number
                return self._scaled(value) if is_sum else value

            copied.args = tuple(changed(value, place) for place, value in enumerate(node.args))
        self._replaced.append(node)
        return copied

    def _scaled(self, value: Any) -> Node:
        """Return a value that does not depend on the micro-batch, times the micro-batch's share."""
        if self._share is None:
            self._share = self._placeholder(SHARE, torch.empty((), dtype=torch.float32))
        made = call(self._graph, aten.mul.Tensor, (self._share, value))
        dtype = value.meta["val"].dtype if isinstance(value, Node) else torch.float32
        return made if not dtype.is_floating_point or dtype is torch.float32 else self._cast(made, dtype)

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype is dtype else call(self._graph, aten.to.dtype, (node, dtype))

    def _mean_loss(self, node: Node) -> Node:
        """Add the losses up one by one, and divide by what the mean divides by, of the whole batch."""
        target: Any = node.target
        schema = target._schema.arguments
        given = [argument(node, each.name) for each in schema if not each.kwarg_only]
        place = next(i for i, each in enumerate(schema) if each.name == "reduction")
        given[place] = NONE
        with self._graph.inserting_before(node):
            each = call(self._graph, node.target, tuple(given), dict(node.kwargs))
            # in float32: the digits of bf16 or fp16 do not hold a sum over a batch
            total = call(self._graph, aten.sum.default, (each,), {"dtype": torch.float32})
            counted = self._t.of(node)
            (count,) = counted.counts if isinstance(counted, Total) else (Count("one"),)
            if count.kind == "targets":
                target, ignored, weight = count.nodes
                leaf = count_targets(self._graph, target, ignored, weight)
                number = self._counted_number(leaf, (op_name(node) in TARGETS, *count.nodes))
            else:
                number = self._elements(each, None, self._source_of(node))
            return self._cast(call(self._graph, aten.div.Tensor, (total, number)), node.meta["val"].dtype)

    def _source_of(self, node: Node) -> Rows:
        states = (self._t.of(source) for source in flat(node.args))
        return next(state for state in states if isinstance(state, Rows))

    def _mean(self, node: Node) -> Node:
        source, dims = node.args[0], argument(node, "dim")
        assert isinstance(source, Node)
        state = self._t.of(source)
        assert isinstance(state, Rows)
        with self._graph.inserting_before(node):
            if dims is None:
                total = call(self._graph, aten.sum.default, (source,), {"dtype": torch.float32})
            else:
                many = dims if isinstance(dims, list | tuple) else [dims]
                options = (source, list(many), argument(node, "keepdim", False))
                total = call(self._graph, aten.sum.dim_IntList, options, {"dtype": torch.float32})
            number = self._elements(source, dims, state)
            return self._cast(call(self._graph, aten.div.Tensor, (total, number)), node.meta["val"].dtype)

    def _elements(self, source: Node, dims: Any, state: Rows) -> Node:
        """Compute the number of elements of a value that a mean is over, in the whole batch."""
        value: Tensor = source.meta["val"]
        if self._capture.sizes is not None:
            return self._counted_number(count_elements(self._capture, source, dims), (source, str(dims)))
        many = range(value.dim()) if dims is None else [int(d) for d in (dims if isinstance(dims, list) else [dims])]
        each = 1
        for dim in {dim % value.dim() - value.dim() for dim in many} - {state.dim}:
            # a second open size: the whole batch's is unknown before all of it has been read
            if carriers(value) != [state.dim] and dim in carriers(value):
                raise CannotCountError(source)
            each *= int(value.shape[dim])
        picked = None if state.order is None else state.order.picked
        if picked is None:
            times = multiple_of(value.shape[state.dim], self._t.batch)
            if times is None:
                raise CannotCountError(source)
            return self._size_number(times * each, torch.float32)
        leaf = call(self._graph, aten.mul.Tensor, (call(self._graph, aten.sum.default, (picked,)), each))
        return self._counted_number(leaf, (picked, each))

    def _use_numbers(self, node: Node) -> None:
        """Give a value of each example that takes a fact of the batch that of the whole batch."""
        value = node.meta["val"]
        dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else None
        for source in dict.fromkeys(flat((*node.args, *node.kwargs.values()))):
            if isinstance(self._t.of(source), BatchConstant):
                if dtype is None:
                    raise CannotCountError(source)
                node.replace_input_with(source, self._number(source, dtype))

    # -- numbers of the whole batch --------------------------------------------------------------------------

    def _number(self, fact: Node, dtype: torch.dtype) -> Node:
        """The placeholder of a fact; a size has the dtype of what it is combined with."""
        value = fact.meta["val"]
        if isinstance(value, Tensor):
            return self._numbered((fact, None), value, value.dtype, lambda: self._finish_of(fact))
        return self._numbered((fact, dtype), None, dtype, lambda: self._finish_of(fact))

    def _size_number(self, each: int, dtype: torch.dtype) -> Node:
        return self._numbered(("size", each), None, dtype, lambda: self._size_leaf(each))

    def _counted_number(self, leaf: Node, key: tuple[object, ...]) -> Node:
        value = leaf.meta["val"]
        return self._numbered(("counted", key), value, value.dtype, lambda: self._leaf_of(leaf))

    def _numbered(self, key: Any, like: Tensor | None, dtype: torch.dtype, finish: Callable[[], Any]) -> Node:
        if key not in self._numbers:
            name = f"{PREFIX}{len(self._results)}"
            self._results.append((name, dtype, finish()))
            self._numbers[key] = self._placeholder(name, torch.empty((), dtype=dtype) if like is None else like)
        return self._numbers[key]

    def _placeholder(self, key: str, like: Tensor) -> Node:
        with fake_mode_of(self._graph), self._graph.inserting_before(self._first):
            node = self._graph.placeholder(key.replace(".", "_"))
            node.meta["val"] = torch.empty(tuple(like.shape), dtype=like.dtype)
        self._capture.inputs[node.name] = key
        return node

    def _finish_of(self, fact: Node) -> Any:
        """A fact in the graph that computes it from the leaves of the whole batch."""
        if fact not in self._finished:
            self._finished[fact] = self._built(fact)
        return self._finished[fact]

    def _built(self, fact: Node) -> Any:
        state, value, name = self._t.of(fact), fact.meta.get("val"), op_name(fact)
        if isinstance(value, torch.SymInt) and self._capture.sizes is not None:
            with self._graph.inserting_before(fact.next):
                return self._leaf_of(call(self._graph, aten.scalar_tensor.default, (fact,), {"dtype": torch.int64}))
        if isinstance(value, torch.SymInt):
            times = multiple_of(value, self._t.batch)
            if times is None:
                raise CannotCountError(fact)
            return self._size_leaf(times)
        if isinstance(state, Fixed):
            return self._built_fixed(fact)
        if fact.op != "call_function" or not isinstance(state, BatchConstant):
            raise CannotCountError(fact)
        if name in ("aten::sum", "aten::mean", *FOUND) and over_examples(self._t, fact):
            return self._built_sum(fact)
        if any(isinstance(self._t.of(source), Rows) for source in flat(fact.args)):
            if name.removesuffix("_").removeprefix("aten::") in ADDING:
                return self._leaf_of(fact)
            raise CannotCountError(fact)
        return self._finish.node_copy(fact, self._finish_of)

    def _built_fixed(self, node: Node) -> Any:
        if node.op != "placeholder":
            return self._finish.node_copy(node, self._finish_of)
        if node.name not in self._capture.buffers and node.name not in self._capture.constants:
            raise CannotCountError(node)
        self._fixed.append(node)
        return self._finish.placeholder(node.name)

    def _built_sum(self, fact: Node) -> Any:
        source, name = fact.args[0], op_name(fact)
        assert isinstance(source, Node)
        state = self._t.of(source)
        assert isinstance(state, Rows)
        with self._graph.inserting_before(fact.next):
            if name == "aten::sum":
                return self._leaf_of(fact)
            if name in FOUND:
                is_any = name == "aten::any"
                which = call(self._graph, aten.ne.Scalar if is_any else aten.eq.Scalar, (source, 0))
                leaf = self._leaf_of(call(self._graph, aten.sum.default, (which,)))
                return self._finish.call_function(aten.gt.Scalar if is_any else aten.eq.Scalar, (leaf, 0))
            if argument(fact, "dim") is not None or (state.order is not None and state.order.picked is not None):
                raise CannotCountError(fact)
            leaf = self._leaf_of(call(self._graph, aten.sum.default, (source,)))
            value = source.meta["val"]
            each = multiple_of(value.numel(), self._t.batch)
            if each is None:
                raise CannotCountError(fact)
            return self._finish.call_function(aten.div.Tensor, (leaf, self._size_leaf(each)))

    def _size_leaf(self, each: int) -> Node:
        key = ("size", each)
        if key not in self._finished:
            self._leaves.append(Leaf((), torch.int64, each))
            self._finished[key] = self._finish.placeholder(f"leaf_{len(self._leaves)}")
        found: Node = self._finished[key]
        return found

    def _leaf_of(self, node: Node) -> Node:
        value = node.meta["val"]
        if carriers(value):
            raise CannotCountError(node)
        self._leaves.append(Leaf(tuple(int(size) for size in value.shape), value.dtype))
        self._counted.append(node)
        if sum(leaf.width for leaf in self._leaves) > _WIDEST:
            raise CannotCountError(node)
        return self._finish.placeholder(f"leaf_{len(self._leaves)}")

    def whole(self, flow: Flow, sections: int) -> Whole:
        """Return what the rewritten graph needs of the whole batch, once it is cut into ``sections`` sections."""
        leaves = [node for node in self._finish.nodes if str(node.target).startswith("leaf_")]
        fixed = [node for node in self._finish.nodes if node.op == "placeholder" and node not in leaves]
        # Whole.finish is given leaves, then fixed: each is put in front of those that were put there before
        for node in reversed((*leaves, *fixed)):
            first = next(iter(self._finish.nodes))
            if node is not first:
                first.prepend(node)
        self._finish.output(tuple(value for _, _, value in self._results))
        counter = section_graph(flow, sections, [], self._counted) if self._counted else None
        own = counter.buffers if counter is not None else ()
        buffers = [self._capture.buffers[str(n.target)] for n in fixed if str(n.target) in self._capture.buffers]
        names = {**self._capture.buffers, **{name: name for name in self._capture.constants}}
        return Whole(
            keys=tuple(key for key, _, _ in self._results),
            dtypes=tuple(dtype for _, dtype, _ in self._results),
            leaves=tuple(self._leaves),
            counter=counter,
            finish=GraphModule(self._capture.owner, self._finish, class_name="Finish"),
            fixed=tuple(names[str(node.target)] for node in fixed),
            buffers=tuple(dict.fromkeys((*own, *buffers))),
        )

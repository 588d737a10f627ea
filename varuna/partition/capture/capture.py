"""Capture: an unmodified module becomes one flat graph of ATen ops.

The model is built under fake tensors, so nothing is allocated, and exported once with a symbolic batch
dimension. Only the loss (and the user's metric sums) are outputs: nothing else of the model's output
survives::

    build, without memory        first samples, at least 3 rows
              |                           |
              v                           v
          LossModule  <---  fake batch, and values: of the code, of samples, of parameters (KnownInputs)
              |
              |   export.py: with as few of these values as lead to a graph; what still
              v   stands in the way becomes one operation that runs as written
       exported program
              |   accept(): regions in line; branches taken by values become
              v   conditions (of samples) and truths (of activations)
           Capture    graph -> (loss, *metric sums), and names for all that flows into it
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only, tree_unflatten

from varuna.core.errors import ModelError, VarunaError
from varuna.data.nest import nested, root
from varuna.data.randomness import seeded
from varuna.data.sizes import OpenSizes, Place, of_samples, told_apart
from varuna.partition.capture.building import BuiltModel, build_without_data, cast_fakes
from varuna.partition.capture.construction import Construction, construct
from varuna.partition.capture.dtypes import HALVES, check_dtypes
from varuna.partition.capture.export import ExportedGraph, export
from varuna.partition.capture.guards import BranchAssumptions, taken_for_granted
from varuna.partition.capture.outputs import OutputsFunction, rows_of
from varuna.partition.capture.parameter_limits import limits_of
from varuna.partition.capture.real_values import Given, RealValues, ValueSource
from varuna.partition.graph.captured import Capture as Capture
from varuna.partition.graph.captured import TensorKind
from varuna.partition.graph.inline import inline_regions
from varuna.partition.graph.ranges import ranges_of
from varuna.partition.graph.size_nodes import SizeNodes
from varuna.partition.graph.squeezes import name_squeezed
from varuna.partition.opaque.eager_modules import Pieces
from varuna.partition.originals.modes import in_evaluation, into_training
from varuna.partition.originals.outside import check_outside, own_buffers_kept
from varuna.partition.originals.stand_ins import in_place_of
from varuna.partition.originals.with_loss import ModelAndLoss
from varuna.partition.watching.cumulative_norms import count_with_tensors
from varuna.partition.watching.explaining import (
    BUILDING,
    ForwardFindings,
    NotExportedError,
    explain,
    in_plain_words,
    line_of,
    of_model,
    one_number,
    without_value,
)
from varuna.partition.watching.fake_mode import FakeMode
from varuna.partition.watching.reassigned import buffers_written_in_place
from varuna.partition.watching.sources import source_digest
from varuna.process.console import say, say_once
from varuna.process.host_lock import turn

FOLLOWED_BELOW_BYTES = 2**30
"""Bytes of parameters in fp32; a larger model is not built to see where its branches on activations go."""


@dataclass
class KnownInputs:
    """Values of one capture, by grade."""

    build: Callable[[], nn.Module]
    model: nn.Module
    """without data: the tensors that export is given"""
    inputs: Mapping[str, Tensor]
    """the batch without data"""
    samples: Mapping[str, Tensor]
    """the batch"""
    buffers: Mapping[str, Tensor]
    """values that the constructor gives to buffers, where they are known"""
    _turn: ExitStack = field(default_factory=ExitStack)
    _whole: dict[str, Tensor] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let one worker of a host at a time build whole models, in this block."""
        with self._turn:
            yield
            self._whole = None

    @property
    def is_small(self) -> bool:
        """Whether the model is small enough to be built."""
        return sum(4 * value.numel() for value in self.model.parameters()) < FOLLOWED_BELOW_BYTES

    def of(self, most: ValueSource) -> Given | None:
        """Values of tensors up to a grade, which operations may write to; None if there are none of that grade."""
        if most is ValueSource.CODE:
            return {}
        if most is ValueSource.PARAMETERS and not self.is_small:
            return None
        named = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        known = self._built() if most is ValueSource.PARAMETERS else self.buffers
        found = {id(self.inputs[key]): (value.clone(), ValueSource.SAMPLES) for key, value in self.samples.items()}
        for name, value in known.items():
            if name in named and named[name].shape == value.shape:
                # a way may write to buffers, so each gets copies; nothing writes to parameters, which are large
                is_first = isinstance(named[name], nn.Parameter)
                grade = ValueSource.PARAMETERS if is_first else ValueSource.SAMPLES
                found[id(named[name])] = (value.to(named[name].dtype, copy=not is_first), grade)
        return found

    def _built(self) -> dict[str, Tensor]:
        """The model as ``torch.manual_seed(0); build()`` makes it, so that all workers and seeds agree."""
        if self._whole is None:
            names = repr([(name, tuple(value.shape)) for name, value in self.model.named_parameters()])
            self._turn.enter_context(turn(hashlib.sha256(names.encode()).hexdigest()))
            with seeded(0), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                module = self.build()
            self._whole = {
                name: value.detach() for name, value in (*module.named_buffers(), *module.named_parameters())
            }
        return self._whole


Batch = Mapping[str, Tensor]
LossFunction = Callable[[Any, Batch], Tensor]
MetricsFunction = Callable[[Any, Batch], Mapping[str, Tensor]]

_NAMED = 3
EXPORT_EXAMPLES = 3
"""Examples in the batch that is exported: 1 would be specialised (0/1 rule), 2 is a common head count."""


@dataclass(frozen=True)
class Recipe:
    """The user's choices about the model: everything that capture needs."""

    build: Callable[[], nn.Module]
    loss: LossFunction | None = None
    metrics: MetricsFunction | None = None
    dtype: torch.dtype = torch.float32
    """anything else: parameters, floating buffers and floating inputs are cast to it, as ``model.to(dtype)`` does"""
    training: bool = True
    """False: as ``model.eval()`` makes it"""
    own: nn.Module | None = None
    """the script's own model or loss, if ``build`` copies it: code that refers to it gets the copy that runs"""
    trains_nothing_else: bool = False
    """the script's optimizer is built, so that no parameter beside the model's is trained"""
    eager: tuple[str, ...] = ()
    """paths of modules that run as written, as one operation each, if that is known already"""
    outputs: OutputsFunction | None = None
    """for predictions, instead of loss and metrics: tensors with a row for each example"""
    sizes: OpenSizes | None = None
    """sizes of a batch that its samples tell; None: one, the number of samples"""


class LossModule(nn.Module):
    """The user's model with only its loss and metric sums as outputs."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.loss = recipe.loss
        self.metrics = recipe.metrics
        self.outputs = recipe.outputs
        self.dtype = recipe.dtype
        self.takes = accepted_keys(model)
        self.__dict__["own"] = recipe.own  # no part of this module

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the metric sums (detached, float32); of a prediction any number, and its rows."""
        own: nn.Module | None = self.__dict__["own"]
        copied: nn.Module = self.model
        if isinstance(copied, ModelAndLoss) and not isinstance(own, ModelAndLoss):  # the script has built the loss only
            copied = copied.loss_itself
        with in_place_of(own, copied), own_buffers_kept(self.loss), buffers_written_in_place(self.model):
            return self._run(batch)

    def _run(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        whole = nested(batch)
        keys = whole.keys() if self.takes is None else [key for key in whole if key in self.takes]
        output = self.model(**{key: tree_map_only(Tensor, self._cast, whole[key]) for key in keys})
        if self.outputs is not None:
            rows = rows_of(self.outputs(output, whole), batch)
            return torch.stack([value.sum().to(torch.float32) for value in rows.values()]).sum(), rows
        loss = loss_of(output) if self.loss is None else loss_of(self.loss(output, whole), "loss=")
        sums = dict(self.metrics(output, whole)) if self.metrics is not None else {}
        for name, value in sums.items():
            _check_sum(name, value)
        return loss, {name: value.detach().to(torch.float32) for name, value in sums.items()}

    def _cast(self, value: Tensor) -> Tensor:
        is_cast = self.dtype is not torch.float32 and value.is_floating_point()
        return value.to(self.dtype) if is_cast else value


def _check_sum(name: str, value: object) -> None:
    if not isinstance(value, Tensor) or tuple(map(str, value.shape)) not in ((), ("1",)):  # symbols stay unasked
        found = f"a tensor of shape {_shape(value)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ModelError(
            f"metrics= must return a dict of scalar tensors, sums over the batch, but {name!r} is {found}. Sum it, "
            "such as with (predicted == labels).sum()."
        )


def accepted_keys(model: nn.Module) -> frozenset[str] | None:
    """Names that ``forward`` takes; None if it takes any (``**kwargs``). A model of PEFT's takes those of its base."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        base: Any = getattr(model, "get_base_model", None)
        return None if base is None else accepted_keys(base())
    return frozenset(parameter.name for parameter in parameters)


_WAYS_TO_LOSS = {
    "the model": (
        "when it is called with a sample's keys",
        "Put the labels into dataset[i], or pass loss=fn(output, batch) to Trainer.",
    ),
    "loss=": ("when it is called with output and batch", "Take the mean over the batch, of all terms together."),
}


def loss_of(output: object, who: str = "the model") -> Tensor:
    """Find the loss in what the model, or ``loss=``, returns.

    Raises:
        ModelError: it is not a scalar tensor, and has none.
    """
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, list | tuple):
        scalars = [value for value in output if _is_scalar(value)]
        loss = scalars[0] if len(scalars) == 1 else None
    if isinstance(loss, Tensor) and tuple(loss.shape) == (1,):
        loss = loss[0]
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = (
            f"a tensor of shape {_shape(loss)}"
            if isinstance(loss, Tensor)
            else type(output).__name__.removeprefix("Sym")
        )
        when, way_out = _WAYS_TO_LOSS[who]
        raise ModelError(
            f"{who} must return a scalar loss, or an object, dict or tuple that contains it, {when}; found {found}. "
            f"{way_out}"
        )
    return loss


def _shape(value: Tensor) -> str:
    return in_plain_words(str(tuple(value.shape)))


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def capture(recipe: Recipe, batch: Batch) -> Capture:
    """Export the model on fake tensors shaped like ``batch``.

    Args:
        recipe: the model and how its loss is found.
        batch: a collated batch; only shapes and dtypes matter. The first dimension is the batch, unless the recipe has
            open sizes.

    Raises:
        ModelError: the model cannot be built or exported; names the user's file and line.
    """
    batch, sizes = of_samples(batch), recipe.sizes
    samples = {key: value.detach().cpu() for key, value in batch.items()}
    # more than that where a loss needs them, such as the k largest of a micro-batch (JobSpec.captured_batch)
    rows = max(EXPORT_EXAMPLES, len(next(iter(samples.values()))))
    samples = _rows(samples, rows) if sizes is None else told_apart(samples, sizes)
    mode = FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    try:
        model, buffers = _built(recipe, mode)
        with mode:
            fake = {key: torch.zeros(tuple(value.shape), dtype=value.dtype) for key, value in samples.items()}
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(explain("cannot be built without allocating it", error, BUILDING)) from error
    _check_keys(model, batch)
    _name_others(model, recipe, batch)
    module = LossModule(model, recipe)
    givens = KnownInputs(recipe.build, model, fake, samples, buffers)
    taken = BranchAssumptions(None, ())

    def accept(program: torch.export.ExportedProgram, values: RealValues, noticed: ForwardFindings) -> bool:
        nonlocal taken
        inputs, buffers = _inputs(program, list(fake)), _buffers(program, _first_names(model))
        inline_regions(program.graph, program.graph_module, buffers)
        found = taken_for_granted(
            program.graph,
            program.graph_module,
            inputs,
            buffers,
            _constants(program, noticed),
            places=values.places,
            decided=values.decided,
            of_activations=values.most is ValueSource.PARAMETERS,
            is_certain=values.most is ValueSource.CODE,
        )
        taken = found or taken
        return found is not None

    try:
        with givens.open():
            exported = export(module, fake, givens.of, accept, _pieces(module, recipe), sizes)
    except VarunaError:
        raise
    except NotExportedError as refused:
        cause = refused.__cause__ or refused
        if isinstance(cause, VarunaError):
            raise cause from None
        said = explain("cannot be captured", cause, noticed=refused.noticed)
        raise ModelError(of_model(said, model, cause, is_small=givens.is_small)) from cause
    except Exception as error:
        said = explain("cannot be captured", error)
        raise ModelError(of_model(said, model, error, is_small=givens.is_small)) from error
    sources = source_digest(model, recipe.build, recipe.loss, recipe.metrics, recipe.outputs)
    found = _describe(exported, model, list(fake), taken, sources, sizes)
    check_outside(found.graph, found.constants, exported.noticed, trains_nothing_else=recipe.trains_nothing_else)
    return found


def _built(recipe: Recipe, mode: FakeMode) -> BuiltModel:
    """Build the model on fake tensors, in the modes and the dtype that it is captured in."""
    built = build_without_data(recipe.build, mode)
    check_dtypes(built.module, recipe.dtype)
    if recipe.dtype is not torch.float32:
        cast_fakes(built.module, mode, recipe.dtype)
    if recipe.training:
        _name_evaluated(into_training(built.module))
    else:
        built.module.eval()
    count_with_tensors(built.module)
    return built


def _rows(samples: Batch, count: int) -> dict[str, Tensor]:
    rows = torch.arange(count) % len(next(iter(samples.values())))
    return {key: value[rows] for key, value in samples.items()}


def _pieces(module: LossModule, recipe: Recipe) -> Pieces:
    """Modules that may have to run as written, with initial values for the runs that show what they make."""
    first_name = _first_names(module.model)

    @cache
    def construction() -> Construction | None:
        try:
            return construct(recipe.build, 0)
        except ModelError:
            return None

    def initial(name: str) -> Tensor | None:
        if name not in first_name or (made := construction()) is None:  # of a module that forward() makes, for one
            return None
        name = first_name[name]
        try:
            return made.parameter(name, 0) if name in made.parameters else made.buffer(name, 0)
        except (ModelError, KeyError):
            return None

    known = dict.fromkeys(recipe.eager, "it does so in training")
    return Pieces(module, module.model, recipe.build, initial, known, has_rows=recipe.sizes is None)


def _check_keys(model: nn.Module, batch: Batch) -> None:
    takes = accepted_keys(model)
    needed = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    has = dict.fromkeys(map(root, batch))
    missing = [name for name in needed if name not in has]
    if missing or (takes is not None and not takes.intersection(has)):
        raise ModelError(
            f"{type(model).__name__}.forward needs {', '.join(missing or sorted(takes or ()))}, but a sample has "
            f"{', '.join(has)}. Name the keys of dataset[i] after the arguments of forward."
        )


def _name_others(model: nn.Module, recipe: Recipe, batch: Batch) -> None:
    """Say which keys of a sample ``forward`` does not take; a function of the user's may read any."""
    takes = accepted_keys(model)
    if takes is None or recipe.loss is not None or recipe.metrics is not None:
        return
    others = ", ".join(repr(key) for key in dict.fromkeys(map(root, batch)) if key not in takes)
    if others:
        say_once(f"samples also have {others}, which {type(model).__name__}.forward() does not take: not used")


def _name_evaluated(model: nn.Module) -> None:
    """Say which modules stay in evaluation mode: a loop that calls ``model.train()`` would not leave them there."""
    if found := in_evaluation(model):
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        say_once(
            f"in evaluation mode stay, as model= gives them: {', '.join(found[:_NAMED])}{more}; with model.train() "
            "before Trainer(...), all of the model is in training mode"
        )


def _inputs(program: torch.export.ExportedProgram, keys: list[str]) -> dict[str, str]:
    names = dict(zip(program.graph_signature.user_inputs, keys, strict=True))
    if any(not isinstance(name, str) for name in names):
        raise ModelError("the model ignores every tensor of a sample: nothing can be trained on it")
    return {str(placeholder): key for placeholder, key in names.items()}


def _buffers(program: torch.export.ExportedProgram, first_name: Mapping[str, str]) -> dict[str, str]:
    found = program.graph_signature.inputs_to_buffers
    return {placeholder: first_name[name.removeprefix("model.")] for placeholder, name in found.items()}


def _constants(program: torch.export.ExportedProgram, noticed: ForwardFindings) -> dict[str, Tensor]:
    """Values by placeholder.

    Raises:
        ModelError: a placeholder has no value.
    """
    for placeholder in program.graph_signature.inputs_to_lifted_custom_objs:
        where = next((line for node in _users(program, placeholder) if (line := line_of(node)) is not None), None)
        raise ModelError(
            f"forward() computes{f' at {where}' if where else ''} with an object of torch's that is no tensor "
            f"({placeholder}), which a graph cannot hold. Compute with tensors, or move this code into a submodule "
            "that takes and returns tensors."
        )
    found: dict[str, Tensor] = {}
    for placeholder, name in program.graph_signature.inputs_to_lifted_tensor_constants.items():
        value = program.constants[name]
        if not isinstance(value, Tensor) or isinstance(value, torch._subclasses.FakeTensor):
            lines = [line for node in _users(program, placeholder) if (line := line_of(node)) is not None]
            raise ModelError(without_value(name, lines[0] if lines else None, noticed))
        found[placeholder] = value
    return found


def _users(program: torch.export.ExportedProgram, placeholder: str) -> list[torch.fx.Node]:
    return list(next(node for node in program.graph.nodes if node.name == placeholder).users)


def _describe(
    exported: ExportedGraph,
    model: nn.Module,
    keys: list[str],
    taken: BranchAssumptions,
    sources: str,
    sizes: OpenSizes | None,
) -> Capture:
    program = exported.program
    first_name = _first_names(model)
    parameters = {
        placeholder: first_name[name.removeprefix("model.")]
        for placeholder, name in program.graph_signature.inputs_to_parameters.items()
    }
    inputs = _inputs(program, keys)
    named = dict(model.named_parameters())
    graph, buffers = program.graph, _buffers(program, first_name)
    inline_regions(graph, program.graph_module, buffers)
    name_squeezed(graph)
    limits, constants = limits_of(graph), _constants(program, exported.noticed)
    if len(limits) < exported.limits:  # some are in a region of the graph, out of which nothing can be returned
        raise ModelError(without_value("lifted_tensor_0", None, exported.noticed))
    if taken.unseen:
        say(f"forward() asserts something at {', '.join(taken.unseen)} that a captured graph cannot: it is left out")
    symbols: dict[Any, tuple[str, int]] = {}
    if sizes is not None:
        sizes, symbols = _open_symbols(graph, inputs, sizes)
        SizeNodes(graph, symbols).read_from_inputs()
    return Capture(
        graph=graph,
        owner=program.graph_module,
        parameters=parameters,
        trainable=frozenset(name for name, value in named.items() if value.requires_grad),
        aliases={name: first for name, first in first_name.items() if name != first},
        buffers=buffers,
        constants=constants,
        inputs=inputs,
        batch_symbol=_batch_symbol(graph, inputs, exported.noticed) if sizes is None else None,
        sizes=sizes,
        open_symbols=symbols,
        metrics=_metric_names(program),
        shapes={name: tuple(value.shape) for name, value in named.items()},
        kinds=(_kinds(named), _kinds(dict(model.named_buffers()))),
        pairs=frozenset(name for name, value in named.items() if value.is_complex()),
        dtypes={name: value.dtype for name, value in named.items() if value.dtype in HALVES},
        packed={name: v.dtype for name, v in named.items() if not v.is_floating_point() and not v.is_complex()},
        visits_all=exported.visits_all,
        conditions=taken.conditions,
        ranges=ranges_of(graph, program.graph_module, inputs, constants),
        truths=(*taken.truths, *limits),
        eager=exported.eager,
        sources=sources,
    )


def _kinds(named: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    return {name: TensorKind(tuple(value.shape), value.dtype, value.requires_grad) for name, value in named.items()}


def _metric_names(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Names of the metric sums, in the order in which they were flattened."""
    _, sums = tree_unflatten(list(range(len(program.graph_signature.user_outputs))), program.call_spec.out_spec)
    return tuple(sorted(sums, key=sums.__getitem__))


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> the first name of the same tensor: by identity, never by name."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(value), name) for name, value in named}


def _open_symbols(
    graph: torch.fx.Graph, inputs: Mapping[Any, str], sizes: OpenSizes
) -> tuple[OpenSizes, dict[Any, tuple[str, int]]]:
    """The open sizes that the graph reads, and for the symbol of each a placeholder and a dimension that have it.

    Raises:
        ModelError: forward() works for one value of a size only.
    """
    nodes = {inputs[node.name]: node for node in graph.find_nodes(op="placeholder") if node.name in inputs}
    places: dict[Any, list[Place]] = {}
    per_sample: dict[Any, float] = {}
    for group, each in zip(sizes.places, sizes.per_sample, strict=True):
        for key, dim in group:
            size = nodes[key].meta["val"].shape[dim]
            if not nodes[key].users:
                continue
            if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
                raise ModelError(
                    f"forward() works for one size of dimension {dim} of {key!r} only ({size}), but it differs between "
                    "batches that collate= makes. Look for numbers that are made of it, as in int(x.shape[0]), "
                    "[0] * len(x) or x.tolist(), or for loops over it."
                )
            places.setdefault(size.node.expr, []).append((key, dim))
            per_sample.setdefault(size.node.expr, each)
    read = {symbol: (nodes[key].name, dim) for symbol, [(key, dim), *_] in places.items()}
    found = OpenSizes(tuple(map(tuple, places.values())), tuple(per_sample.values()), sizes.samples)
    return found, read


def _batch_symbol(graph: torch.fx.Graph, inputs: Mapping[Any, str], noticed: ForwardFindings) -> Any:
    """The symbol of dimension 0 of the inputs.

    Raises:
        ModelError: none has one: forward() works for one number of examples only.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.name in inputs:
            size = node.meta["val"].shape[0]
            if isinstance(size, torch.SymInt):
                return size.node.expr
    raise ModelError(one_number(noticed))

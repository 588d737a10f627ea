"""Before it is applied: does the user's update train the same model in any plan, and after a change of plan?

Some steps of ``before_step=``, the optimizer and its schedule, on drawn parameters and gradients, as stages make them:
on one stage; with its state moved in between, as in a morph or a resumed run; on a stage for each section; and with
other gradients in one section. No forward or backward pass is needed for that, and large shapes are made small.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.section_state import JSON, from_bytes, to_bytes
from varuna.checks.causes import some_of
from varuna.checks.drawn import drawn, small, tried
from varuna.checks.remembering import check_after_step, check_repeats, check_schedule
from varuna.core.errors import UsageError
from varuna.data.randomness import SeededTurn, seeded
from varuna.engine.stage.cross_stage import Exchange, LocalExchange, installed
from varuna.engine.stage.job import Frozen
from varuna.engine.stage.load_state import optimizer_state_of, state_in
from varuna.engine.stage.optimizer import (
    BeforeStep,
    OptimizerFactory,
    SchedulerFactory,
    StageOptimizer,
    call_before_step,
)
from varuna.engine.stage.parameter_groups import whole_groups
from varuna.partition.after_step import AfterStep
from varuna.partition.model import PartitionedModel
from varuna.partition.object_copies import independent
from varuna.partition.optimizer_state import BESIDE
from varuna.partition.optimizers import SeveralOptimizers, build_optimizer, is_torchs
from varuna.partition.parameter_marks import ParameterMarks, put_marks
from varuna.partition.plain_values import from_json
from varuna.partition.watching.user_lines import at_place

_KEEP_IN_OPTIMIZER = (
    "What step() changes in state[parameter], in the options of its groups, and in attributes that are numbers, texts, "
    "small tensors, or lists and dicts of those is moved and saved. Keep it there; tensors as large as a parameter in "
    "state[parameter]."
)
_KEEP_NOTHING = (
    "before_step= must not remember anything: workers come and go. before_step(named, step) is told the number of the "
    "step. Numbers that the loop computes belong into a dict that state= names, and what belongs to a parameter into "
    "state[parameter] of an optimizer of your own."
)
_STEPS = 4
_MOVED_STEPS, _MOVED_AFTER = 12, (0, 1)
"""Steps that are tried, and those after which state moves: slow weights, used every few steps, are missed later."""
_MOST_ELEMENTS = 2**21
"""Larger models are tried with small dimensions."""
_CLOSE = 1e-4
_BLOWN_UP = 4096.0

Values = Mapping[str, Tensor]


class Trained(NamedTuple):
    """A parameter after some steps: its value, how far it has moved, and its optimizer's state."""

    value: Tensor
    way: Tensor
    tensors: Mapping[str, Tensor]
    scalars: Mapping[str, JSON]


ByName = Mapping[str, Trained]
Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class UpdateCheck:
    """The check of one job's update."""

    model: PartitionedModel
    optimizer: OptimizerFactory
    scheduler: SchedulerFactory | None = None
    before_step: BeforeStep | None = None
    marks: ParameterMarks = field(default_factory=dict)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """on which the update runs"""
    frozen: Frozen | None = None
    after_step: AfterStep | None = None
    kept: Sequence[Any] = ()
    """objects whose contents move with the run: those that ``state=`` names"""

    @cached_property
    def beginning(self) -> tuple[BeforeStep | None, list[Any]]:
        """``before_step`` as it is before step 0, whatever it remembers later, and what ``state=`` names of it."""
        copies: dict[int, Any] = {}
        return independent(self.before_step, copies), [copies[id(each)] for each in self.kept if id(each) in copies]

    def of_names(self) -> None:
        """Check that ``before_step`` would not change parameters that are not trained, if it were given them.

        Raises:
            UsageError: it would, as it does in a plain loop over ``model.named_parameters()``.
        """
        others = [name for name in self.model.shapes if name not in self.model.trainable]
        if self.before_step is None or not others:
            return
        named = []
        for name, shape in self.model.shapes.items():
            value, gradient = (drawn(name, small(shape), number).to(self.device) for number in range(2))
            named.append((name, parameter := nn.Parameter(value, requires_grad=name not in others)))
            parameter.grad = None if name in others else gradient
        put_marks(named, self.marks)
        before, function = {name: value.detach().clone() for name, value in named}, independent(self.beginning[0])

        def changed() -> list[str]:
            with seeded(0, "update check"), installed(LocalExchange()):
                call_before_step(function, named, 0)
            return [name for name, value in named if name in others and not torch.equal(value, before[name])]

        if odd := tried(changed):
            raise UsageError(
                f"before_step={at_place(self.before_step)} changes {some_of(odd)}, if it is given all parameters. "
                "They are not trained, and it is given the trained parameters of a stage only. Compute what follows "
                "from trained parameters, like a teacher, in after_step=, which runs once per step, after the "
                "optimizer, with all parameters and buffers."
            )

    def of_zero_grad(self) -> None:
        """Check that the optimizer's ``zero_grad`` leaves no gradients: a step never has those of the one before.

        Raises:
            UsageError: it does.
        """
        named = [(name, nn.Parameter(value)) for name, value in self._first_values.items()]
        put_marks(named, self.marks)
        try:
            with seeded(0, "update check"), installed(LocalExchange()):
                built = build_optimizer(self.optimizer, named)
                for name, parameter in named:
                    parameter.grad = self.drawn(name, 1)
                built.step()  # some clear gradients here
                for part in built.parts if isinstance(built, SeveralOptimizers) else (built,):
                    part.zero_grad()
        except Exception:  # noqa: BLE001 - whatever the user's code raises; training will say it
            return
        held = {id(parameter) for group in built.param_groups for parameter in group["params"]}
        odd = [name for name, value in named if id(value) in held and value.grad is not None and value.grad.any()]
        if odd:
            raise UsageError(
                f"zero_grad() of the optimizer{at_place(self.optimizer)} leaves gradients of {some_of(odd)}. Varuna "
                "does not call it: each step has the gradients of its own batch alone. Keep what the next step needs "
                "in the optimizer's state[parameter], and add it in step()."
            )

    def of_moves(self) -> None:
        """Check that what the update needs of earlier steps is moved and saved.

        Raises:
            UsageError: it trains otherwise after a change of plan, or on resume.
        """
        _ = self.beginning
        if self.frozen is not None:
            check_repeats("frozen=", self.frozen, self._names)
        if self.after_step is not None and self.model.following is not None:
            check_after_step(self.after_step, self.model.following, self.kept)
        if self.scheduler is not None:
            check_schedule(self.scheduler, lambda steps: _Stage(self, self._first_values, {}, steps).optimizer)
        expected = self._expected
        stayed = None if expected is None else self._outcome_in([self._names], steps=_MOVED_STEPS)
        moved = None if stayed is None else self._outcome_in([self._names], steps=_MOVED_STEPS, moves=True)
        if stayed is not None and moved is not None and (odd := _differences(moved, stayed)):
            raise UsageError(
                f"{self._what} would train otherwise after a change of plan, or when the run resumes: {some_of(odd)} "
                "would become other, since something that it keeps from step to step is not moved with its "
                f"parameters. {_KEEP_IN_OPTIMIZER if self.before_step is None else _KEEP_NOTHING}"
            )

    def of_stages(self) -> None:
        """Check, once, that no parameter depends on those of other sections, unless by ``all_reduce_shared``.

        Raises:
            UsageError: one does: several stages would train another model.
        """
        if odd := self._apart:
            raise UsageError(
                f"{self._what} computes something over parameters of several sections, of which a stage has a part "
                f"only: on several stages {some_of(odd)} would become other. varuna inspect --trace names the "
                "lines. Combine it over the stages with varuna.all_reduce_shared, or train on one stage: varuna run "
                "--stages 1. For gradient clipping, pass clip_grad_norm= to varuna.Trainer."
            )

    @cached_property
    def _apart(self) -> Sequence[str]:
        """Parameters that become other on several stages."""
        expected = self._expected
        if expected is None or len(self._sections) < 2:
            return ()
        found = [] if self._shared else _differences(self._outcome_in(self._sections) or expected, expected)
        return found or self.reached[1]

    @cached_property
    def reached(self) -> tuple[Sequence[str], Sequence[str]]:
        """Parameters of a section, and those elsewhere that change with its gradients; both empty if none do.

        Gradients are once blown up (clipping), once infinite (overflow). What goes through ``all_reduce_shared`` stays.
        """
        expected = self._expected
        if expected is not None and len(self._sections) > 1:
            for section, factor in ((self._sections[0], _BLOWN_UP), (self._sections[-1], float("inf"))):
                if odd := self._reached(section, factor, expected):
                    return section, odd
        return (), ()

    @property
    def draws(self) -> bool:
        """Return whether the update draws random numbers: another seed makes something else of the same gradients."""
        expected = self._expected
        other = None if expected is None else replace(self, seed=self.seed + 1)._outcome_in([self._names])
        return expected is not None and other is not None and bool(_differences(other, expected))

    # -- what is tried -------------------------------------------------------------------------------------------

    @cached_property
    def _sections(self) -> list[list[str]]:
        """Trainable parameters that the loss uses by their owners, without sections that have none."""
        used = {name for section in self.model.sections for name in section.parameters}
        found: dict[int, list[str]] = {}
        for name in self.model.shapes:
            if name in self.model.trainable and name in used:
                found.setdefault(self.model.owner_of(name), []).append(name)
        return [found[section] for section in sorted(found)]

    @property
    def _names(self) -> list[str]:
        return [name for its in self._sections for name in its]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(self.model.shapes[name]) for name in self._names}
        if sum(torch.Size(shape).numel() for shape in shapes.values()) <= _MOST_ELEMENTS:
            return shapes
        return {name: small(shape) for name, shape in shapes.items()}

    @property
    def _first_values(self) -> Values:
        return {name: self.drawn(name, 0) for name in self._names}

    def drawn(self, name: str, step: int) -> Tensor:
        """First values of a parameter (step 0), or its gradients."""
        return (0.1 * drawn(name, self._shapes[name], step)).to(self.device)

    @cached_property
    def _is_plain(self) -> bool:
        """No code of the user's runs in an update; or it cannot be tried."""
        if self.before_step is not None:
            return not self._sections
        try:
            with seeded(0, "update check"):
                named = [(name, nn.Parameter(self.drawn(name, 0))) for name in self._names]
                put_marks(named, self.marks)
                return not named or is_torchs(build_optimizer(self.optimizer, named))
        except Exception:  # noqa: BLE001 - whatever the user's function raises; training will say it
            return True

    @property
    def _what(self) -> str:
        """Name the function that computes the update, with its line, as far as that is simple to tell."""
        given = "the optimizer" if self.before_step is None else "before_step= (or the optimizer)"
        return f"{given}{at_place(self.before_step or self.optimizer)}"

    @cached_property
    def _shared(self) -> list[Tensor]:
        """Return what ``all_reduce_shared`` returned on one stage, in order."""
        recorded = _Recorded()
        self._run([self._names], exchange=recorded)
        return recorded.answers

    @cached_property
    def _expected(self) -> ByName | None:
        """Parameters after some steps on one stage; None: nothing can be told from them."""
        if self._is_plain:
            return None
        one, again = self._outcome_in([self._names]), self._outcome_in([self._names])
        if one is None or again is None or _differences(again, one):  # it draws by itself: the replicas are compared
            return None
        return one

    def _reached(self, own: Sequence[str], factor: float, expected: ByName) -> list[str]:
        """Parameters of other sections that other gradients in one section change."""
        change: Change = lambda name, value: value * factor if name in own else value  # noqa: E731
        found = tried(lambda: self._run([self._names], change=change, exchange=_Recorded(self._shared)))
        return [] if found is None else _differences(found, expected, but=frozenset(own))

    def _outcome_in(
        self, stages: Sequence[Sequence[str]], *, steps: int = _STEPS, moves: bool = False
    ) -> ByName | None:
        """Parameters after some steps; None if the user's code fails on drawn values, here or when it moves."""
        return tried(lambda: self._run(stages, steps=steps, moves=moves))

    def _run(
        self,
        stages: Sequence[Sequence[str]],
        *,
        steps: int = _STEPS,
        moves: bool = False,
        change: Change = lambda name, value: value,
        exchange: Exchange | None = None,
    ) -> ByName:
        with seeded(0, "update check"):
            made = [_Stage(self, {name: self.drawn(name, 0) for name in names}, {}, 0) for names in stages]
        for step in range(steps):
            for stage in made:
                gradients = {name: change(name, self.drawn(name, step + 1)) for name, _ in stage.named}
                with installed(exchange or LocalExchange()):
                    stage.apply(step, gradients)
            if moves and step in _MOVED_AFTER:
                made = [stage.moved(step + 1) for stage in made]
        return {name: stage.kept(name, value.detach()) for stage in made for name, value in stage.named}

    @cached_property
    def groups(self) -> Any:
        """Parameter groups of the whole model, which a schedule needs."""
        return () if self.scheduler is None else whole_groups(self.optimizer, self._shapes)


class _Stage:
    """One stage's part of the update, as the engine makes it."""

    def __init__(
        self,
        check: UpdateCheck,
        values: Values,
        state: Mapping[str, Mapping[str, Any]],
        steps: int,
        kept: Mapping[int, Any] | None = None,
    ) -> None:
        self._check = check
        self.named = [(name, nn.Parameter(value.clone())) for name, value in values.items()]
        put_marks(self.named, check.marks)
        (before_step, moves), copies = check.beginning, dict(kept or {})
        self._before_step = independent(before_step, copies)
        self._kept = {id(each): copies[id(each)] for each in moves if id(each) in copies}
        self.optimizer = StageOptimizer(check.optimizer, check.scheduler, self.named, state, steps, whole=check.groups)

    def apply(self, step: int, gradients: Values) -> None:
        """Make a step."""
        frozen = self._check.frozen
        for name, parameter in self.named:
            parameter.grad = None if frozen is not None and frozen(name, step) else gradients[name]
        with SeededTurn(self._check.seed, "update", step):
            call_before_step(self._before_step, self.named, step)
            self.optimizer.update(lambda written: None)
        self.optimizer.advance()

    def kept(self, name: str, value: Tensor) -> Trained:
        """Return what became of a parameter."""
        return Trained(value, value - self._check.drawn(name, 0), *self.optimizer.state_of(name))

    def moved(self, steps: int) -> "_Stage":
        """The stage built again from its state, as bytes."""
        state = from_bytes(to_bytes(state_in(0, dict(self.named), {}, self.optimizer.state_of, None)))
        values = {name: state.tensors[f"parameters/{name}"].to(self._check.device) for name, _ in self.named}
        return _Stage(self._check, values, optimizer_state_of({0: state}, (0,)), steps, self._kept)


class _Recorded:
    """Answers ``all_reduce_shared`` as one stage does, or as before: what goes that way may reach other sections."""

    def __init__(self, before: Sequence[Tensor] = ()) -> None:
        self._before = iter(before)
        self.answers: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """The answer of the same call before; else its own part."""
        self.answers.append(next(self._before, tensor).detach().clone())
        return self.answers[-1].clone()

    def owns(self, parameter: Tensor) -> bool:
        """True: one stage owns everything."""
        return True


def _differences(found: ByName, expected: ByName, but: frozenset[str] = frozenset()) -> list[str]:
    """Return what differs by more than rounding: parameters, and what their optimizer keeps beside them."""
    odd: dict[str, None] = {}
    for name, kept in expected.items():
        if name not in but:
            other = found[name]
            if not _is_close(other.value, kept.value, kept.way):
                odd[name] = None
            for key, value in kept.tensors.items():
                if key not in other.tensors or not _is_close(other.tensors[key], value, value):
                    odd[f"state[parameter][{key!r}] of {name}"] = None
            for key in kept.scalars.keys() | other.scalars.keys():
                one, two = kept.scalars.get(key), other.scalars.get(key)
                if not _is_alike(one, two):
                    odd[_beside(one, two) if key == BESIDE else f"state[parameter][{key!r}] of {name}"] = None
    return list(odd)


def _is_close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Return whether two tensors are alike but for rounding of themselves, and of what was added to them."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    room = _CLOSE * scale.abs() + 2 * torch.finfo(expected.dtype).eps * expected.abs()
    same = (found == expected) | (found.isnan() & expected.isnan()) | ((found - expected).abs() <= room)
    return bool(same.all())


def _is_alike(one: JSON, two: JSON) -> bool:
    if isinstance(one, float) and isinstance(two, float | int):
        return one == two or (one != one and two != two) or math.isclose(one, two, rel_tol=_CLOSE)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_is_alike, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_alike(one[key], two[key]) for key in one)
    return one == two


def _beside(one: JSON, two: JSON) -> str:
    """The first entry beside parameters that differs."""
    lists = [each if isinstance(each, list) else [] for each in (one, two)]
    entries: list[Any] = [*lists[0], *lists[1]]
    other = [each for each in entries if not all(any(_is_alike(each, its) for its in side) for side in lists)]
    label, _, key, _ = other[0] if other else entries[0]
    return f"{label}[{from_json(key)!r}]"

"""Changes by the loop to what it handed over are taken over, or refused by name; all else is its own business."""

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from varuna import UsageError
from varuna.engine.stage.optimizer import call_before_step
from varuna.job.built import fill_module
from varuna.job.handed_over import watching
from varuna.job.handed_over.marks import mark_of
from varuna.job.handed_over.watching import (
    AFTER_STEP,
    BEFORE_STEP,
    COLLATE,
    DATASET,
    LOSS,
    METRICS,
    OF_OPTIMIZER,
    OPTIMIZER,
    HandedOver,
    Role,
)

Loop = Callable[["Script"], Any]
beta, gamma = 0.0, torch.tensor(1.0)
seen: list[float] = []


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.temperature, self.history, self.coefficients, self.best = 1.0, [0.0], [1.0, 2.0], 9.0
        self.config = SimpleNamespace(drop=0.1, title="a net")
        self.teacher = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x)) / self.temperature * self.scale + self.coefficients[0]
        return F.dropout(logits, self.config.drop)

    def summary(self) -> str:
        return f"{self.best} {self.history}"


class Course(Dataset[Any]):
    level = 0

    def __init__(self) -> None:
        self.reads, self.cache, self.note = 0, dict[int, Tensor](), ""
        self.transform = SimpleNamespace(p=0.5)
        self.scratch = np.zeros(100)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        np.copyto(self.scratch, self.reads)
        self.cache[index] = torch.ones(4) * self.level * self.transform.p
        return {"x": self.cache[index]}


def kl_weight() -> float:
    return beta


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    seen.append(float(len(batch)))
    return output.mean() * kl_weight() + gamma


class Entries(dict[str, Any]):
    """A configuration whose entries are its attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Schedule:
    """As a script's own annealing object."""

    def __init__(self) -> None:
        self.value, self.calls = 0.5, 0

    def __call__(self) -> float:
        self.calls += 1
        return self.value


class Script:
    """The objects of a script, and those that it gives to a Trainer."""

    def __init__(self) -> None:
        global beta
        beta = 0.0
        gamma.fill_(1.0)
        Net.scale = 1.0
        self.model = Net()
        self.values, self.shifts = np.ones(20, dtype=np.float32), np.zeros(100, dtype=np.float32)
        self.model.register_buffer("mask", torch.from_numpy(self.values))
        self.plain_weight = self.model.head.weight.data
        self.part, self.others = Course(), [{"x": float(number)} for number in range(20)]
        self.parts: list[Any] = [self.part, self.others]
        self.samples: list[dict[str, Any]] = [{"x": torch.ones(20), "label": 1} for _ in range(50)]
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        vars(self.optimizer).update(rectify=True, extra={"beta": 0.1})
        self.data = Course()
        self.schedule, self.options = Schedule(), {"margin": 0.2, "best": 0.0}
        self.noise: dict[str, Any] = {"scale": 0.1}
        self.kept: dict[str, Any] = {"scale": 0.1}
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.losses: list[float] = []
        self.bound, self.columns = 5.0, ("x",)
        self.weights, self.config, self.entries = [1.0], SimpleNamespace(power=1.0), Entries(power=1.0, best=0.0)

    def handed(self) -> HandedOver:
        schedule, options, noise, kept, bound = self.schedule, self.options, self.noise, self.kept, self
        weights, config, entries = self.weights, self.config, self.entries
        counter = {"calls": 0}

        def metrics(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"far": (output > options["margin"]).sum() * schedule()}

        def weighed(output: Tensor, batch: Any, weights: Any = weights, *, config: Any = config) -> Tensor:
            found: Tensor = output.mean() * weights[0] * config.power * entries.power
            return found

        def before_step(named: Any) -> None:
            counter["calls"] += 1
            for _, parameter in named:
                parameter.grad.mul_(noise["scale"] + kept["scale"])

        def collate(samples: list[Any]) -> dict[str, Tensor]:
            return {"x": torch.stack([each["x"].clamp(max=bound.bound) + bound.shifts[0] for each in samples])}

        functions: list[tuple[Role, Any]] = [(LOSS, loss), (LOSS, weighed), (LOSS, self.criterion), (METRICS, metrics)]
        functions += [(BEFORE_STEP, before_step), (COLLATE, collate), (DATASET, Subset(self.data, [1, 2]))]
        functions += [(DATASET, self.samples), (DATASET, ConcatDataset(self.parts))]
        functions += [(OPTIMIZER, lambda named: torch.optim.SGD(named, lr=bound.optimizer.defaults["lr"]))]
        made = HandedOver(functions, model=self.model, optimizer=self.optimizer, kept={"kept": self.kept})
        made.begin()
        return made


def run(loop: Loop) -> Any:
    """Give a loop control, as the Trainer does; returns the options that are taken over."""
    script = Script()
    handed = script.handed()
    try:
        script.data[0]  # as training reads them, before the script gets control
        for _ in range(2):
            with handed.script():
                loop(script)
            handed.check(None)
        return handed.options and handed.options.written()
    finally:
        handed.end()


def assign(**values: Any) -> Loop:
    return lambda _: globals().update(values)


def no_grad(work: Callable[[Script], Any]) -> Loop:
    return lambda script: torch.no_grad()(work)(script)


REFUSED: dict[str, tuple[Loop, str]] = {
    "a global that a function of the loss reads": (assign(beta=0.5), r"beta, which loss= reads.* was 0.0.* now 0.5"),
    "a tensor that the loss reads": (lambda _: gamma.fill_(3.0), "gamma, which loss= reads"),
    "an attribute of a loss module": (
        lambda s: setattr(s.criterion, "label_smoothing", 0.0),
        "label_smoothing of a module that loss= uses: it was 0.1, and is now 0.0",
    ),
    "a key that metrics reads": (lambda s: s.options.update(margin=1.0), "options.*margin.*, which metrics= reads"),
    "a list that is an argument's default": (lambda s: s.weights.insert(0, 2.0), r"weights\[0\], which loss= reads"),
    "an object that is a keyword's default": (lambda s: setattr(s.config, "power", 2.0), "config.power, which loss="),
    "an entry that is read as an attribute": (lambda s: s.entries.update(power=2.0), r"entries\['power'\], which loss"),
    "an object that metrics calls": (lambda s: setattr(s.schedule, "value", 1.0), "value, which metrics= reads"),
    "what before_step reads": (lambda s: s.noise.update(scale=0.0), "which before_step= reads.*state="),
    "what collate reads": (lambda s: setattr(s, "bound", 1.0), r"bound, which collate= reads.*set_step\(step\)"),
    "a dataset's attribute": (lambda s: setattr(s.data, "level", 2), "level, which dataset reads: it was 0"),
    "an attribute of a dataset's part": (lambda s: setattr(s.data.transform, "p", 0.0), "transform.p, which dataset"),
    "an attribute of one of several datasets": (lambda s: setattr(s.part, "level", 2), "level, which dataset reads"),
    "a sample of one of several datasets": (
        lambda s: s.others[0].update(x=9.0),
        r"dataset.datasets\[1\]\[0\]\['x'\], which dataset reads: it was 0.0, and is now 9.0",
    ),
    "what the optimizer's function reads": (lambda s: s.optimizer.defaults.update(lr=1.0), "which optimizer= reads"),
    "requires_grad": (lambda s: s.model.head.requires_grad_(False), "requires_grad of head.weight"),
    "requires_grad as an attribute": (
        lambda s: setattr(s.model.head.bias, "requires_grad", False),
        "requires_grad of head.bias",
    ),
    "weights by .data": (lambda s: s.model.head.weight.data.clamp_(-0.1, 0.1), "wrote to head.weight.*after_step="),
    "weights in place": (no_grad(lambda s: s.model.head.weight.mul_(0.5)), "wrote to head.weight"),
    "weights by an operator": (no_grad(lambda s: s.model.head.weight.__imul__(0.5)), "wrote to head.weight"),
    "weights by a method of nn.init": (lambda s: nn.init.zeros_(s.model.head.bias), "wrote to head.bias"),
    "weights by an alias of before the loop": (lambda s: s.plain_weight.mul_(0.5), "changed head.weight of the model"),
    "a buffer that is a NumPy array's": (lambda s: s.values.fill(0.5), "changed mask of the model"),
    "an array that collate reads": (
        lambda s: s.shifts.fill(0.5),
        r"shifts\[0\], which collate= reads.* was 0.0, and is now 0.5",
    ),
    "a sample of a list": (lambda s: s.samples[0].update(label=2), r"dataset\[0\]\['label'\].* was 1, and is now 2"),
    "a tensor of a sample": (lambda s: s.samples[25]["x"].mul_(2), r"dataset\[25\]\['x'\], which dataset reads"),
    "the order of a list of samples": (lambda s: s.samples.reverse(), r"changed dataset, which dataset reads"),
    "a sample more": (lambda s: s.samples.append(s.samples[0]), r"changed dataset, which dataset reads"),
    "a frozen teacher": (no_grad(lambda s: s.model.teacher.weight.lerp_(torch.ones(2, 4), 0.1)), "no optimizer trains"),
    "a buffer": (lambda s: s.model.body[2].running_mean.zero_(), "running_mean.*no optimizer trains"),  # type: ignore[operator]
    "reading weights": (lambda s: s.losses.append(s.model.head.weight.norm().item()), "read head.weight.*ema="),
    "averaging weights": (
        lambda s: torch.optim.swa_utils.AveragedModel(nn.Linear(4, 2)).update_parameters(s.model.head),
        "read head.weight",
    ),
    "gradients": (lambda s: [p.grad for p in s.model.parameters()], "asked for the gradient of .*step.grad_norm"),
    "clipping": (lambda s: nn.utils.clip_grad_norm_(s.model.parameters(), 1.0), "gradient of .*clip_grad_norm="),
    "the mode of a part": (lambda s: s.model.body[2].eval(), "body.2.training of the model: it was True"),
    "dropout": (lambda s: setattr(s.model.body[1], "p", 0.0), "body.1.p of the model: it was 0.1, and is now 0.0"),
    "an attribute that forward reads": (
        lambda s: setattr(s.model, "temperature", 0.5),
        r'temperature of the model.*1.0.*0.5.*batch\["step"\]',
    ),
    "a class's attribute, hidden by an own one": (lambda s: setattr(s.model, "scale", 2.0), "scale of the model"),
    "a class's attribute": (lambda _: setattr(Net, "scale", 2.0), r"Net.scale, which forward\(\) reads: it was 1.0"),
    "forward": (lambda s: setattr(s.model, "forward", lambda x: x), "forward of the model"),
    "a list that forward reads": (
        lambda s: s.model.coefficients.insert(0, 5.0),
        r"model\.coefficients\[0\], which forward\(\) reads: it was 1.0, and is now 5.0",
    ),
    "a model's configuration": (
        lambda s: setattr(s.model.config, "drop", 0.0),
        r"model\.config\.drop, which forward\(\) reads",
    ),
    "a layer": (lambda s: setattr(s.model, "head", nn.Linear(4, 2)), "head of the model"),
    "a hook": (lambda s: s.model.head.register_forward_hook(lambda *_: None), "head.* of the model"),
    "an optimizer's attribute": (lambda s: setattr(s.optimizer, "rectify", False), "rectify of the optimizer"),
    "a dict of an optimizer": (lambda s: s.optimizer.extra.update(beta=0.2), "extra of the optimizer.*0.1.*0.2"),
    "an optimizer's state": (lambda s: s.optimizer.state[s.model.head.weight].update(step=0), "state of the optimizer"),
    "another optimizer": (
        lambda s: setattr(s, "optimizer", torch.optim.Adam(s.model.parameters())),
        "built an optimizer over body.0.weight .* behind the loop",
    ),
    "another optimizer with groups": (
        lambda s: torch.optim.Adam([{"params": list(s.model.head.named_parameters()), "lr": 0.1}]),
        "built an optimizer over head.weight",
    ),
    "a new group": (
        lambda s: s.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "groups cannot be added in the loop",
    ),
    "parameters of a group": (lambda s: s.optimizer.param_groups[0]["params"].pop(), "which parameters are in"),
    "an option that is no value": (
        lambda s: s.optimizer.param_groups[0].update(lr=lambda: 0.1),
        "option 'lr' of param_groups",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_change_of_what_training_reads_is_refused_by_name(case: str) -> None:
    loop, message = REFUSED[case]
    with pytest.raises(UsageError, match=rf"(?s){message}"):
        run(loop)


def rescale(*_: Any) -> None:
    shared["scale"] = 2.0


shared: dict[str, Any] = {"scale": 1.0, "seen": [1.0]}
UNSEEN: dict[str, tuple[Role, Callable[..., Any], Role, Callable[..., Any]]] = {
    "a hook that writes what the loss reads": (
        OF_OPTIMIZER,
        rescale,
        LOSS,
        lambda *_: shared["scale"],
    ),
    "a hook that adds to what the dataset sums": (
        OF_OPTIMIZER,
        lambda *_: shared["seen"].append(1.0),
        DATASET,
        lambda *_: sum(shared["seen"]),
    ),
    "collate, which writes what before_step sums": (
        COLLATE,
        lambda samples: shared.update(scale=2.0),
        BEFORE_STEP,
        lambda named: shared["scale"],
    ),
    "a dataset that adds to what before_step looks at": (
        DATASET,
        lambda *_: shared["seen"].append(1.0),
        BEFORE_STEP,
        lambda named: shared["seen"][0],
    ),
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_one_function_writes_for_another_that_does_not_see_it_is_refused(case: str) -> None:
    writer, writes, reader, reads = UNSEEN[case]
    with pytest.raises(UsageError, match=f"{writer.name} writes shared.* which {reader.name} reads.*number of the ste"):
        HandedOver([(writer, writes), (reader, reads)]).begin()


SEEN: dict[str, tuple[Role, Role, Callable[..., Any]]] = {
    "another entry": (OF_OPTIMIZER, LOSS, lambda *_: shared["seen"][0]),
    "those that read ahead together": (COLLATE, DATASET, lambda *_: shared["scale"]),
    "those that run in the step": (BEFORE_STEP, AFTER_STEP, lambda *_: shared["scale"]),
}


@pytest.mark.parametrize("case", SEEN)
def test_other_functions_may_write_for_each_other(case: str) -> None:
    writer, reader, reads = SEEN[case]
    HandedOver([(writer, rescale), (reader, reads)]).begin()


def idempotent(script: Script) -> None:
    script.model.train()
    script.model.teacher.requires_grad_(False)
    script.model.zero_grad()
    script.optimizer.zero_grad()


ACCEPTED: dict[str, Loop] = {
    "losses": lambda s: s.losses.append(1.0),
    "a list to which the loss appends": lambda _: seen.append(1.0),
    "an entry that nobody reads as an attribute": lambda s: s.entries.update(best=0.7),
    "a key that metrics does not read": lambda s: s.options.update(best=0.7),
    "an attribute of the model that forward does not read": lambda s: setattr(s.model, "best", 0.7),
    "a list of the model that forward does not read": lambda s: s.model.history.append(0.7),
    "a configuration's entry that forward does not read": lambda s: setattr(s.model.config, "title", "another"),
    "a dataset's note": lambda s: setattr(s.data, "note", "epoch 2"),
    "samples": lambda s: s.data[3],
    "a key that a sample gets": lambda s: s.samples[0].update(cached=torch.ones(4)),
    "an object's own counter": lambda s: s.schedule(),
    "what state= names, for before_step": lambda s: s.kept.update(scale=0.0),
    "calls that change nothing": idempotent,
    "sizes": lambda s: sum(p.numel() for p in s.model.parameters() if p.requires_grad) + len(repr(s.model)),
    "evaluation mode and back": lambda s: s.model.eval() and s.model.train(),
    "random numbers": lambda _: torch.rand(3),
    "an optimizer of its own": lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters()),
    "a module of its own": lambda _: nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward(),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_training_does_not_read_is_the_scripts_own_business(case: str) -> None:
    assert run(ACCEPTED[case]) == {}


def test_a_model_in_evaluation_mode_trains_so_train_changes_nothing() -> None:
    script = Script()
    script.model.eval()
    handed = script.handed()
    with handed.script():
        script.model.train()
    handed.check(None)
    handed.end()


def test_what_runs_in_every_step_may_change_its_own_values() -> None:
    """A counter in before_step, a cache in the dataset: they run while the script has no control, or beside it."""
    script = Script()
    handed = script.handed()
    script.noise["scale"] = 0.3
    script.data[5]
    with handed.script():
        script.data[6]
    handed.check(None)
    handed.end()


def test_functions_that_run_within_a_step_use_what_they_are_given_and_varuna_itself_may_touch_the_model() -> None:
    script = Script()
    handed = script.handed()
    fill_module(script.model, {"head.bias": torch.zeros(2)})
    named = list(script.model.named_parameters())

    def sizes(given: Any) -> None:
        seen.append(sum(parameter.numel() for _, parameter in named if parameter.requires_grad))

    def clips(given: Any) -> None:
        nn.utils.clip_grad_norm_([parameter for _, parameter in named], 1.0)

    def clamps(given: Any) -> None:
        script.model.head.weight.data.clamp_(-0.1, 0.1)

    call_before_step(sizes, [], 0)
    with pytest.raises(UsageError, match=r"gradient of body.0.weight.*before_step= is given.*test_watching.py"):
        call_before_step(clips, [], 0)
    with pytest.raises(UsageError, match=r"wrote to head.weight"):
        call_before_step(clamps, [], 0)
    with pytest.raises(UsageError, match=r"asked for the state of the optimizer \(test_watching.py"):
        call_before_step(lambda given: script.optimizer.state.clear(), [], 0)
    handed.end()
    with pytest.raises(UsageError, match=r"asked for the state of the optimizer.*also after the loop.*checkpoints="):
        len(script.optimizer.state)


OPTIONS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "a rate": (lambda group: group.update(lr=0.5), {"lr": 0.5}),
    "a rate from the one before": (lambda group: group.update(lr=group["lr"] * 0.5), {"lr": 0.05}),
    "several": (lambda group: group.update(momentum=0.5, weight_decay=1e-2), {"momentum": 0.5, "weight_decay": 1e-2}),
    "a number of NumPy's": (lambda group: group.update(lr=torch.tensor(0.25).numpy()[()]), {"lr": 0.25}),
    "a pair": (lambda group: group.update(betas=(0.8, 0.9)), {"betas": (0.8, 0.9)}),
    "the same": (lambda group: group.update(lr=0.1), {}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_the_loop_writes_are_taken_over(case: str) -> None:
    write, expected = OPTIONS[case]
    script = Script()
    handed = script.handed()
    with handed.script():
        write(script.optimizer.param_groups[0])
    handed.check(None)
    assert handed.written(0) == {(0, key): value for key, value in expected.items()}
    assert handed.written(1) == {}
    handed.end()


def test_a_run_that_has_gone_back_must_be_written_the_same_and_state_is_the_way_out() -> None:
    script = Script()
    handed = script.handed()

    def turn(step: int, shown: float, rate: float) -> None:
        with handed.script([{**group, "params": [], "lr": shown} for group in script.optimizer.param_groups]):
            script.optimizer.param_groups[0]["lr"] = rate
        handed.written(step)

    turn(0, 0.1, 0.1)
    turn(1, 0.1, 0.05)
    turn(2, 0.05, 0.025)
    turn(1, 0.1, 0.05000001)  # by a loss that another plan has computed
    turn(2, 0.025, 0.025)
    with pytest.raises(UsageError, match=r"gone back.*After step 1 .*lr=0\.0125.*0\.05.* the first time.*state="):
        turn(1, 0.1, 0.0125)
    with pytest.raises(UsageError, match=r"After step 0 .*lr=0\.2.*nothing.*the first time"):
        turn(0, 0.1, 0.2)
    handed.end()


def test_the_scripts_groups_show_what_the_next_step_uses() -> None:
    script = Script()
    handed = script.handed()
    with handed.script([{"params": [], "lr": 0.7, "momentum": 0.9}]):
        assert script.optimizer.param_groups[0]["lr"] == 0.7
    assert handed.written(0) == {}
    handed.end()


def test_options_that_a_function_writes_within_the_step_are_refused() -> None:
    script = Script()
    handed = script.handed()
    script.optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(UsageError, match=r"within the step wrote lr=0.3.*do it there"), handed.script():
        pass
    handed.end()


def test_a_table_of_functions_costs_a_comparison_and_no_mark_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[Any] = []
    table: dict[str, Callable[[], float]] = {f"loss {number}": kl_weight for number in range(50)}

    def metrics(output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": output.sum() * table["loss 0"]() * len(table)}

    handed = HandedOver([(METRICS, metrics)])
    handed.begin()

    def noted(value: Any, *more: Any) -> Any:
        marked.append(value)
        return mark_of(value, *more)

    monkeypatch.setattr(watching, "mark_of", noted)
    with handed.script():
        pass
    handed.check(None)
    assert not any(value is table for value in marked)
    with handed.script():
        table["loss 3"] = float
    with pytest.raises(UsageError, match=r"changed table, which metrics= reads"):
        handed.check(None)
    handed.end()


def test_the_message_names_the_line_that_writes_and_afterwards_the_model_is_free() -> None:
    def loop(script: Script) -> None:
        script.data.level = 7

    script = Script()
    handed = script.handed()
    with handed.script():
        loop(script)
    with pytest.raises(UsageError, match=rf"test_watching.py:{loop.__code__.co_firstlineno + 1}\)"):
        handed.check(sys._getframe())
    handed.end()
    assert type(script.model.head.weight) is nn.Parameter
    assert script.model(torch.ones(2, 4)).shape == (2, 2)

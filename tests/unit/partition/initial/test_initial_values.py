"""A run starts from the same parameters in any plan, or not at all."""

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.depth import by_depth, nightly_rows
from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2, tiny_llama
from tests.unit.engine.plain import reference, worst
from tests.unit.engine.ranks import Setup, connected, single_threaded
from varuna.core.errors import ModelError, UsageError
from varuna.engine.worker.agreement import checksum, share_refusal
from varuna.job.options import Weights
from varuna.job.spec import JobSpec
from varuna.partition.capture.capture import Recipe
from varuna.partition.initial.initial_values import begin_with
from varuna.process.host_lock import turn
from varuna.testing.threads import run_all


def saved(build: Callable[[], nn.Module], folder: Path, shards: str = "5GB") -> None:
    """A checkpoint whose values no seed of these tests gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(77)
        build().save_pretrained(folder, max_shard_size=shards)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "shards"),
    by_depth([(tiny_gpt2, "30KB")], [(tiny_gpt2, "5GB"), (tiny_gpt2, "30KB"), (tiny_llama, "30KB")]),
)
def test_weights_train_as_a_plain_loop_from_from_pretrained(
    tmp_path: Path, build: Callable[[], nn.Module], shards: str
) -> None:
    from transformers import AutoModelForCausalLM

    saved(build, tmp_path, shards)
    with single_threaded():
        setup = Setup(build=build, weights=tmp_path)
        one = setup.losses(1, 1)
        assert setup.losses(2, 1) == one
        split = setup.losses(2, 2)
        setup.build = lambda: AutoModelForCausalLM.from_pretrained(tmp_path)
        assert worst(split, one) < 1e-5
        assert worst(one, reference(setup)) < 1e-5


@pytest.mark.nightly
def test_parameters_drawn_one_by_one_train_the_same_in_any_plan() -> None:
    with single_threaded():
        setup = Setup(init="per_parameter")
        one = setup.losses(1, 1)
        assert setup.losses(3, 1) == one
        assert worst(setup.losses(2, 2), one) < 1e-5
        assert setup.losses(2, 2) == setup.losses(2, 2)
        assert one != Setup().losses(1, 1)


class Disturbed(Setup):
    """One rank begins with another value of one parameter."""

    odd_rank, odd_name, odd_by = 3, "transformer.h.1.mlp.c_fc.weight", 1e-6

    def initial(self, rank: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        values = dict(super().initial(rank, names))
        if rank == self.odd_rank and self.odd_name in values:
            values[self.odd_name].view(-1)[5] += self.odd_by
        return values


def test_different_weights_on_one_replica_stop_the_run_before_step_0(tmp_path: Path) -> None:
    saved(tiny_gpt2, tmp_path)
    with pytest.raises(ModelError, match=r"section \d+ \(.*\) starts with different parameters on rank 1 and rank 3"):
        Disturbed(build=tiny_gpt2, weights=tmp_path).run(2, 2)


def test_different_copies_of_a_tied_parameter_stop_the_run() -> None:
    setup = Disturbed()
    setup.odd_rank, setup.odd_name = 1, "embed.weight"
    with pytest.raises(ModelError, match=r"tied parameter embed.weight .* rank 0 and rank 1.*per_parameter"):
        setup.run(2, 1)


@pytest.fixture
def unlike_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank computes on a processor of its own kind."""
    kinds = itertools.count()
    monkeypatch.setattr("varuna.engine.worker.forming.rounding_kind", lambda device: next(kinds))


@pytest.mark.parametrize(
    ("plan", "odd_rank", "odd_name"),
    [((1, 3), 1, "layers.0.bias"), ((2, 2), 1, "embed.weight"), *nightly_rows(((3, 1), 2, "embed.weight"))],
)
@pytest.mark.usefixtures("unlike_processors")
def test_what_unlike_processors_round_differently_begins_as_the_first_has_it(
    plan: tuple[int, int], odd_rank: int, odd_name: str
) -> None:
    """Also a tied parameter, of which a replica's second copy is the odd one."""
    with single_threaded():
        setup = Disturbed()
        setup.odd_rank, setup.odd_name = odd_rank, odd_name
        assert setup.losses(*plan) == Setup().losses(*plan)


@pytest.mark.usefixtures("unlike_processors")
def test_other_values_are_no_rounding_on_any_processor() -> None:
    setup = Disturbed()
    setup.odd_rank, setup.odd_name, setup.odd_by = 1, "layers.0.bias", 0.1
    with pytest.raises(ModelError, match="starts with different parameters on ranks 0, 2 and rank 1"):
        setup.run(1, 3)


class Refusing(Setup):
    """The rank that looks at the whole model finds something."""

    def initial(self, rank: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        if rank == 0:
            raise ModelError("forward() counts in steps")
        return super().initial(rank, names)


def test_what_one_rank_refuses_all_ranks_say() -> None:
    heard: dict[int, str] = {}
    groups = connected(3)

    def share(rank: int, refusal: ModelError | None) -> None:
        with pytest.raises(ModelError) as caught:
            share_refusal(groups[rank], rank, 3, refusal)
        heard[rank] = str(caught.value)

    run_all([partial(share, rank, ModelError("fünf") if rank == 1 else None) for rank in range(3)])
    assert heard == {0: "rank 1 refused the job: fünf", 1: "fünf", 2: "rank 1 refused the job: fünf"}
    run_all([partial(share_refusal, groups[rank], rank, 3, None) for rank in range(3)])
    for stages, replicas in ((1, 1), (2, 1)):
        with pytest.raises(ModelError, match=r"^(rank 0 refused the job: )?forward\(\) counts in steps$"):
            Refusing().run(stages, replicas)


class BuiltByEach(Setup):
    """As in processes of their own."""

    def initial(self, rank: int, names: Sequence[str]) -> Mapping[str, Tensor]:
        return self.beginning.parameters(names)


@pytest.mark.nightly
def test_a_model_that_is_not_a_function_of_the_seed_is_caught() -> None:
    def unseeded() -> nn.Module:
        model = SmallLanguage()
        with torch.no_grad():
            model.get_parameter("layers.0.bias").fill_(int.from_bytes(os.urandom(2), "little"))
        return model

    with pytest.raises(ModelError, match="starts with different parameters on rank 0 and rank 1"):
        BuiltByEach(build=unseeded).run(1, 2)


def test_a_checksum_sees_bits_shapes_and_order() -> None:
    a, b = torch.arange(4.0), torch.zeros(4)
    assert checksum([a, b]) == checksum([a.clone(), b.clone()])
    values = [checksum(t) for t in ([a, b], [b, a], [a.view(2, 2), b], [a, -b], [a.double(), b], [a[:0]], [])]
    assert len(set(values)) == len(values)
    assert checksum([a.view(2, 2).T]) == checksum([a.view(2, 2).T.contiguous()])


@pytest.mark.nightly
def test_one_model_at_a_time_is_built_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("varuna.partition.initial.initial_values.WORTH_COLLECTING_BYTES", 0)
    building: list[int] = []
    most: list[int] = []
    built: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        building.append(1)
        most.append(len(building))
        model = tiny_gpt2(layers=1)
        built.append(weakref.ref(model))
        building.pop()
        return model

    shapes = {name: tuple(value.shape) for name, value in tiny_gpt2(layers=1).named_parameters()}
    recipe = Recipe(build)
    beginnings = [
        begin_with(recipe, shapes, seed=0, init="constructor", weights=None, digest="test-turns") for _ in range(4)
    ]
    run_all([partial(each.parameters, shapes) for each in beginnings])
    assert most == [1] * 4
    assert [model() for model in built] == [None] * 4  # freed, all but the copies


def test_a_frozen_builder_holds_nobody_up_for_ever_and_no_file_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with turn("test-frozen"), turn("test-frozen", bound_s=0.05):
        assert "continuing at the same time" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with turn("test-frozen", bound_s=0.05):
        assert not capsys.readouterr().err


@pytest.mark.nightly
def test_the_trainer_refuses_bad_values_and_reports_the_beginning(tmp_path: Path) -> None:
    def trainer(**more: object) -> varuna.Trainer:
        return varuna.Trainer(tiny_gpt2, Tokens(), adamw, 8, **more)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="init='zero'"):
        trainer(init="zero")
    with pytest.raises(UsageError, match="does not exist"):
        trainer(weights=tmp_path / "nothing")
    saved(tiny_gpt2, tmp_path)
    initial = JobSpec(tiny_gpt2, Tokens(), adamw, 8, weights=Weights(tmp_path)).initial()
    torch.manual_seed(77)
    for name, value in tiny_gpt2().named_parameters():
        assert initial.parameters[name].equal(value)

"""The specification in one file says what the product does: the same orders and decisions, in the glossary's words.

Its real processes are in tests/scenarios/test_nano_varuna.py.
"""

import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import nano_varuna as nano
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw
from varuna.core.dealing import ends_of_shares
from varuna.schedule.orders import varuna
from varuna.schedule.policy import make_policy, stash_limit

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples" / "nano_varuna.py"
SOURCE = FILE.read_text()
BRACKET = re.compile(r"\[(?:(?P<paper>[A-Z][\w\s-]+?)\s\|\s)?(?P<modules>[a-z_][\w.,\s]*)\]\s*$")
SIZES = [(stages, micro_batches) for stages in (1, 2, 3, 5) for micro_batches in (1, 2, 5, 9)]

# What the field, or we ourselves, call these things elsewhere: one word for one thing.
SYNONYMS = {
    "section": r"chunks?|layers? groups?|shards?",
    "stage": r"partitions?|pipe ranks?",
    "global batch": r"mini-?batch(?:es)?|batch size",
    "micro-batch": r"microbatch(?:es)?",
    "step": r"iterations?|minibatch",
    "generation": r"epochs? of the run|incarnations?|quorum",
    "morph": r"reconfigur\w+|reshap\w+|rebalanc\w+",
    "recompute": r"remateriali\w+|activation checkpoint\w*|gradient checkpoint\w*",
    "worker": r"slaves?|executors?",
    "manager": r"coordinators?|masters?|drivers?|controllers?",
    "replica": r"data[- ]parallel groups?|DP groups?",
}
USED = "section stage replica micro-batch step plan generation morph recompute checkpoint policy vote commit cut-point"
PAPER = {
    "Design overview",
    "Tuning pipeline efficiency",
    "Problem setting and constraints",
    "Correctness-preserving morphing",
    "Parametrized simulation",
    "Continuous Checkpointing",
    "Varuna Manager",
    "Auto-partitioning",
    "Tracking cross-partition dependencies",
    "Implementation",
    "Overlapping computation and communication",
    "Synchronization of shared state",
}
"""Titles of its sections and paragraphs."""


def job(model: type[torch.nn.Module] = SmallLanguage, sections: int = 16) -> nano.Job:
    return nano.Job(model, Tokens, adamw, global_batch=8, micro_batch=2, steps=4, sections=sections)


@pytest.fixture(scope="module")
def model() -> nano.Model:
    return nano.capture(job())


def prose() -> Iterator[str]:
    """Docstrings, comments and messages."""
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)):
            yield re.sub(r"\[[^\]]*\]", "", token.string.strip('"')) + "\n"


def is_there(module: str) -> bool:
    place = ROOT / "varuna" / module.replace(".", "/")
    return (place / "__init__.py").is_file() or place.with_suffix(".py").is_file()


def documented() -> Iterator[tuple[str, str]]:
    """Functions and classes of the file but those of the demonstration, with their docstrings."""
    code, _, _ = SOURCE.partition("# -- 9.")
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.get_docstring(node) or ""


def test_a_person_reads_it_in_an_hour() -> None:
    assert len(SOURCE.splitlines()) <= 1200
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).partition(".")[0]  # type: ignore[union-attr]
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not {name for name in imported if name in ("varuna", "numpy", "transformers", "pydantic")}


def test_everything_says_which_module_of_the_product_does_the_same() -> None:
    silent, missing, unknown = [], [], []
    for name, text in documented():
        found = BRACKET.search(text)
        if found is None:
            silent.append(name)
            continue
        modules = re.split(r",\s*", " ".join(found["modules"].split()))
        missing += [(name, each) for each in modules if not is_there(each)]
        if found["paper"] and " ".join(found["paper"].split()) not in PAPER:
            unknown.append((name, found["paper"]))
    assert not silent
    assert not missing
    assert not unknown
    assert len(list(documented())) > 30


def test_its_words_are_those_of_the_glossary() -> None:
    glossary, text = (ROOT / "docs/glossary.md").read_text(), "\n".join(prose())
    for word in USED.split():
        assert word in text
        assert word in glossary
    wrong = [(word, hit[0]) for word, other in SYNONYMS.items() for hit in re.finditer(rf"\b(?:{other})\b", text, re.I)]
    assert wrong == []
    told = [line for line in text.splitlines() if "checkpoint" in line.lower()]
    assert not [line for line in told if "activation" in line], (
        "a checkpoint is saved state; the other thing is recompute"
    )


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_its_static_order_is_the_products(stages: int, micro_batches: int) -> None:
    ours = nano.static_orders(stages, micro_batches)
    theirs = varuna(stages, micro_batches)
    kept = [[f"{a.stage}{a.kind}{a.micro_batch}" for a in row] for row in ours]
    assert kept == [[str(action) for action in row] for row in theirs]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_its_policy_decides_as_the_products_whenever_things_arrive(stages: int, micro_batches: int, seed: int) -> None:
    """Each stage by itself, with inputs that come at random."""
    draw = random.Random(seed)
    for stage in range(stages):
        limit = stash_limit(stages, stage, micro_batches)
        ours = nano.Policy(stage, stages, micro_batches)
        theirs = make_policy("varuna", stage=stage, stages=stages, micro_batches=micro_batches, stash_limit=limit)
        activations = 0 if stage else micro_batches
        gradients = 0 if stage < stages - 1 else micro_batches
        while not theirs.finished:
            action, expected = ours.next(activations, gradients), theirs.next(activations, gradients)
            if expected is None:
                assert action is None
                activations = min(micro_batches, activations + draw.randrange(2))
                gradients = min(micro_batches, gradients + draw.randrange(2))
                continue
            assert action is not None
            assert f"{action.stage}{action.kind}{action.micro_batch}" == str(expected)
            if action.kind == "F":
                assert ours.keeps(action) == theirs.keeps(action.micro_batch)
            ours.done(action)
            theirs.done(expected)
        assert ours.backwards == micro_batches


def test_the_picture_of_the_schedule_is_what_the_simulator_says() -> None:
    spans = nano.simulate(5, [1.0] * 4, [0.0] * 3)
    rows = [[".."] * round(max(end for _, _, end in spans)) for _ in range(4)]
    for action, begin, end in spans:
        rows[action.stage][round(begin)] = f"{action.kind}{action.micro_batch}"
        if end - begin > 1:
            rows[action.stage][round(begin) + 1] = "--"
    drawn = [f"    stage {stage}  {' '.join(row)}" for stage, row in enumerate(rows)]
    assert "\n".join(drawn) in (nano.__doc__ or "")


def test_the_picture_of_the_morph_is_what_forming_says() -> None:
    """Six sections, rank 1 of 2x2 lost."""
    before = nano.Plan(2, (0, 3), 6, 8)
    after = nano.Plan(1, (0, 2, 4), 6, 8)
    addresses = {f"w{rank}": ("host", rank) for rank in range(4)}
    reports = {
        name: nano.Report(addresses[name], 5, None, tuple(sorted(before.held_by(rank))))
        for rank, name in enumerate(addresses)
        if rank != 1
    }
    generation = nano.form(after, 2, reports)
    lines = [
        f"w{rank}  rank {rank}  stage {rank % 2}  sections {' '.join(map(str, before.sections_of(rank % 2)))}"
        for rank in range(4)
    ]
    for rank, name in enumerate(generation.members):
        own, kept = after.sections_of(rank), after.kept_by(rank)
        line = f"{name}  rank {rank}  stage {rank}  sections {own[0]} {own[1]}, keeps {kept[0]} {kept[1]}"
        old = int(name[1:])
        lines[old] += f"    {line}"
    document = nano.__doc__ or ""
    for line in (lines[0], lines[2], lines[3]):
        assert line in document
    members = list(generation.members)
    assert {(k, members[source], members[target]) for k, source, target in generation.moves} == {
        (4, "w3", "w0"),
        (5, "w3", "w0"),
        (3, "w3", "w2"),
        (2, "w0", "w3"),
    }


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_micro_batches_are_dealt_as_in_the_product(replicas: int) -> None:
    plan, ends = nano.Plan(replicas, (0,), 4, 8), ends_of_shares(8, replicas)
    assert [plan.micro_batches_of(d) for d in range(replicas)] == [range(ends[d], ends[d + 1]) for d in range(replicas)]


def test_a_step_is_applied_everywhere_or_nowhere() -> None:
    vote = nano.Vote([[0, 2.0, 4.0]], [[0, 0]])
    ahead = nano.Report(("host", 0), 6, vote, (0,))
    behind = nano.Report(("host", 1), 5, None, (1,))
    assert nano.decide({"a": ahead, "b": behind}) == (6, vote)
    assert nano.decide({"a": ahead, "b": ahead}) == (6, None)
    assert nano.decide({"b": behind}) == (5, None)
    with pytest.raises(nano.NanoError, match="all workers are lost"):
        nano.decide({})


def test_a_section_that_nobody_has_ends_the_run_in_words() -> None:
    with pytest.raises(nano.NanoError, match=r"nobody has sections \[1\]"):
        nano.form(nano.Plan(1, (0,), 2, 4), 2, {"w0": nano.Report(("host", 0), 1, None, (0,))})


def test_plans_that_cannot_be_are_refused(model: nano.Model) -> None:
    with pytest.raises(nano.NanoError, match="too few for 99 stages"):
        nano.make_plan(model, job(), 99, 1)
    with pytest.raises(nano.NanoError, match="too few for 1 stages and 5 replicas"):
        nano.make_plan(model, job(), 1, 5)
    with pytest.raises(nano.NanoError, match="no plan for 1 workers"):
        nano.best_plan(model, job(), 1, nano.state_bytes(model, nano.make_plan(model, job(), 1, 1)) - 1)


def test_the_best_plan_fits(model: nano.Model) -> None:
    whole = nano.state_bytes(model, nano.make_plan(model, job(), 1, 1))
    assert nano.best_plan(model, job(), 3, whole - 1).stages > 1
    assert nano.best_plan(model, job(), 1, whole).workers == 1


@pytest.mark.parametrize("build", [SmallLanguage, Dropping])
@pytest.mark.parametrize("sections", [1, 4, 16])
def test_sections_compute_what_the_model_computes(build: type[torch.nn.Module], sections: int) -> None:
    """Losses and gradients, also where a parameter is tied; dropout is drawn alike in F and R."""
    work = job(build, sections)
    captured = nano.capture(work)
    states = [nano.SectionState(work, captured, section) for section in captured.sections]
    batch = nano.read(work, work.dataset(), 0, 1)

    def forward() -> list[nano.Tape]:
        values, tapes = nano.Batch(), list[nano.Tape]()
        for section, state in zip(captured.sections, states, strict=True):
            tapes.append(nano.run_section(section, state, values, batch, nano.number_from(0, 0, 1, section.index)))
            values = {name: value.detach() for name, value in {**values, **tapes[-1][2]}.items()}
        return tapes

    tapes, again = forward(), forward()
    assert torch.equal(tapes[-1][2]["loss"], again[-1][2]["loss"])
    assert tapes[-1][2]["weight"] == 32
    gradients = {"loss": torch.tensor(1.0)}
    for tape in reversed(tapes):
        nano.run_backward(tape, gradients)
    assert gradients == {}
    if build is Dropping:
        return
    torch.manual_seed(work.seed)
    whole = work.build()
    whole(**batch).backward()
    for name, parameter in whole.named_parameters():
        total = sum(state.gradients[name] for state in states if name in state.gradients)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-5, atol=1e-7)


def test_what_it_cannot_do_is_refused() -> None:
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = torch.nn.Embedding(64, 8), torch.nn.BatchNorm1d(8)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.norm(self.embed(input_ids).flatten(0, 1))
            return torch.nn.functional.cross_entropy(logits, labels.flatten() % 8)

    class Squared(Normed):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.mean(self.embed(input_ids) ** 2)

    with pytest.raises(nano.NanoError, match=r"forward\(\) changes tensors in place: .*batch_norm"):
        nano.capture(job(Normed))
    with pytest.raises(nano.NanoError, match="must be an unweighted mean cross-entropy"):
        nano.capture(job(Squared))
    with pytest.raises(nano.NanoError, match="is no multiple of"):
        nano.capture(nano.Job(SmallLanguage, Tokens, adamw, global_batch=8, micro_batch=3, steps=1))


def test_state_becomes_equal_on_its_way() -> None:
    work = job()
    captured = nano.capture(work)
    section = captured.sections[0]
    state, other = (nano.SectionState(work, captured, section) for _ in range(2))
    state.flat.fill_(0.5)
    state.apply(2.0)
    key, tensors = nano.unpacked(nano.packed(("state", 0), state.tensors()))
    assert key == ("state", 0)
    other.load(tensors)
    for each in (state, other):
        each.flat.fill_(0.25)
        each.apply(1.0)
    mine, theirs = state.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    assert any("/exp_avg" in name for name in mine)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_message_that_broke_off_is_no_message() -> None:
    message = nano.packed(("sum", 3), {"flat": torch.arange(10.0)})
    with pytest.raises(ValueError, match="broken off"):
        nano.unpacked(message[:-1])


def test_a_wait_ends_with_its_generation_but_not_for_what_is_here() -> None:
    inbox = nano.Inbox()
    inbox.put(("sum", 1), {})
    inbox.interrupt("the link from rank 2 broke")
    assert inbox.wait(lambda: inbox.pop(("sum", 1)), lambda: "") == {}
    with pytest.raises(nano.Interrupted, match="rank 2"):
        inbox.wait(lambda: inbox.pop(("sum", 1)), lambda: "")


def test_a_wait_has_a_bound_and_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano, "WAIT_S", 0.0)
    inbox = nano.Inbox()
    with pytest.raises(
        nano.NanoError, match=r"rank 1, step 3: waited for the vote of rank 0, which did not come in 0 s"
    ):
        inbox.wait(lambda: inbox.pop(("vote", 3)), lambda: "rank 1, step 3: waited for the vote of rank 0")

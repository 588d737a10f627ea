"""Every method that the library's training loop calls is called here too, or refused if it is overridden."""

import ast
import inspect
import textwrap
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from varuna import UsageError  # noqa: E402
from varuna.integrations.transformers import Seq2SeqTrainer, Trainer  # noqa: E402
from varuna.integrations.transformers.overrides import CALLED, REFUSED, check_overrides  # noqa: E402


def reached(kind: Any, root: str) -> set[str]:
    """Methods of a class that one of them calls on itself, directly or not."""
    seen, todo = set[str](), [root]
    while todo:
        name = todo.pop()
        function = getattr(kind, name, None)
        if name in seen or not inspect.isfunction(function):
            continue
        seen.add(name)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        todo += [node.attr for node in found if isinstance(node.value, ast.Name) and node.value.id == "self"]
    return seen


def test_every_method_of_the_librarys_loop_is_accounted_for() -> None:
    calls = reached(transformers.Trainer, "train")
    assert calls - CALLED - REFUSED.keys() == set()
    assert CALLED.isdisjoint(REFUSED)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_override_that_nobody_would_call_is_refused_by_name(name: str) -> None:
    for base in (Trainer, Seq2SeqTrainer):
        mine = type("Mine", (base,), {name: lambda self: None})
        with pytest.raises(UsageError, match=rf"Mine overrides {name}\(\)"):
            check_overrides(object.__new__(mine))


@pytest.mark.parametrize("name", sorted(CALLED))
def test_an_override_that_is_called_is_none_of_its_business(name: str) -> None:
    check_overrides(object.__new__(type("Mine", (Trainer,), {name: lambda self: None})))


def test_a_method_that_is_replaced_on_the_object_is_refused_too() -> None:
    trainer = object.__new__(Trainer)
    trainer.training_step = lambda *_: None
    with pytest.raises(UsageError, match=r"training_step\(\).*compute_loss"):
        check_overrides(trainer)

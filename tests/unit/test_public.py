"""The public surface is small, and planning needs no torch."""

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest

import varuna

PURE = ["varuna", "varuna.core", "varuna.schedule", "varuna.simulator", "varuna.planner"]


def test_few_names_are_public_and_all_of_them_are_there_and_are_shown() -> None:
    assert len(varuna.__all__) <= 24
    assert all(hasattr(varuna, name) for name in varuna.__all__)
    assert dir(varuna) == varuna.__all__


def test_the_list_of_public_names_is_sorted_and_says_each_once() -> None:
    assert list(varuna.__all__) == sorted(set(varuna.__all__))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'varuna' has no attribute 'Manager'"):
        _ = varuna.Manager


def test_every_error_is_a_varuna_error_with_an_exit_code() -> None:
    errors = [getattr(varuna, name) for name in varuna.__all__ if name.endswith("Error")]
    assert all(issubclass(error, varuna.VarunaError) and error.exit_code > 0 for error in errors)


def test_importing_the_pure_packages_and_all_of_their_modules_does_not_import_torch() -> None:
    program = f"""
import importlib, pkgutil, sys
for name in {PURE}:
    package = importlib.import_module(name)
    if name != "varuna":
        for module in pkgutil.iter_modules(package.__path__, name + "."):
            importlib.import_module(module.name)
            assert "torch" not in sys.modules, module.name
    assert "torch" not in sys.modules, name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_what_training_needs_is_imported_without_collections_in_between(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    seen: list[bool] = []

    def trainer(name: str) -> SimpleNamespace:
        seen.append(gc.isenabled())
        return SimpleNamespace(Trainer=name)

    monkeypatch.setattr(varuna, "import_module", trainer)
    (gc.enable if enabled else gc.disable)()
    try:
        loaded: object = varuna.Trainer
        assert loaded == "varuna.trainer"
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_a_torch_that_is_missing_or_too_new_is_said_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = "import sys; sys.modules['torch'] = None; import varuna; varuna.Trainer"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Training needs torch. In a clone of Varuna: pip install '.[torch]'" in done.stderr

    def odd(name: str) -> None:
        raise AttributeError("no attribute '__func__'")

    monkeypatch.setattr(varuna, "import_module", odd)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.16.0")
    with pytest.raises(ImportError, match=r"'__func__'\. .* found 2\.16\.0: pip install 'torch>=2\.11,<2\.16'$"):
        _ = varuna.Trainer
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    with pytest.raises(AttributeError, match=r"^no attribute '__func__'$"):
        _ = varuna.Trainer

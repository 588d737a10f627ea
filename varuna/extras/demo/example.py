"""The training scripts that the demo runs: beside the sources, or inside the installed package."""

import importlib.util
from pathlib import Path

from varuna.core.errors import UsageError

_PACKAGE = Path(__file__).parents[2]


def example_folder(name: str) -> Path:
    """Folder of the example ``name``.

    Raises:
        UsageError: this installation has no such example.
    """
    for folder in (_PACKAGE / "_examples" / name, _PACKAGE.parent / "examples" / name):
        if (folder / "train.py").is_file():
            return folder
    raise UsageError(
        f"the example {name} is not part of this installation; run `pip install '.[demo]'` in a clone of the repository"
    )


def dataset_size(folder: Path, length: int) -> int:
    """Samples of the example's dataset: windows of ``length`` bytes of its text."""
    spec = importlib.util.spec_from_file_location("varuna_demo_text", folder / "text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return len(module.read_standard_library()) // length

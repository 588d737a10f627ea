"""Owners of the files that lines are in."""

from pathlib import Path

import torch

from varuna.partition.watching.explaining import user_frame


def test_a_package_whose_name_begins_as_torchs_is_the_users() -> None:
    folder = Path(torch.__file__).parent
    places = {}
    for owner in ("torch", "torchvision"):
        file = folder.with_name(owner) / "models.py"
        try:
            exec(compile("raise ValueError", str(file), "exec"), {})
        except ValueError as error:
            places[owner] = str(user_frame(error))
    assert places["torchvision"] == f"{folder.with_name('torchvision') / 'models.py'}:1"
    assert "test_own_code.py:" in places["torch"]

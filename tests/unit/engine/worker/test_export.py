"""Exporting after the loop: those who have something to give need nobody else."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.engine.models import SmallLanguage
from tests.unit.engine.ranks import Setup
from varuna.core.errors import LinkError
from varuna.engine.worker.export import export_model
from varuna.testing.threads import run_all


def test_ranks_with_nothing_to_export_may_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    if Path("/proc/self/fd").exists():
        monkeypatch.setattr(os, "fsync", fsync)
    setup = Setup(build=SmallLanguage)
    setup.run(2, 2, steps=2)
    giving = setup.finished[:2]  # the second replica takes no part
    for session in giving:
        assert session.current is not None
        session.current.inbox.abort(LinkError("a neighbour is gone"))  # as an open link to it would find
    works: list[Callable[[], object]] = [
        partial(export_model, session.current, setup.model, tmp_path / "model.safetensors") for session in giving
    ]
    run_all(works, bound_s=30)
    if Path("/proc/self/fd").exists():
        assert synced == ["model.partial", tmp_path.name]  # a power cut leaves the old file or the new one
    exported = load_file(tmp_path / "model.safetensors")
    expected = {name: value for name, value in setup.parameters().items() if name in exported}
    assert expected.keys() == exported.keys() == set(dict(SmallLanguage().named_parameters()))
    assert all(torch.equal(exported[name], value) for name, value in expected.items())

"""Refusals of ``varuna agent`` before it joins anything."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from varuna.cli import main as cli
from varuna.cli.agent import announced_at
from varuna.core.errors import UsageError
from varuna.process.machine_port import Address

JOIN = f"varuna://{'t' * 24}@127.0.0.1:7070/{'a' * 64}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("203.0.113.7:40123", ("203.0.113.7", 40123)),
        ("[2001:db8::7]:1", ("2001:db8::7", 1)),
        ("h:65535", ("h", 65535)),
    ],
)
def test_where_others_reach_a_machine_is_a_host_and_a_port(text: str, found: tuple[str, int]) -> None:
    assert announced_at(text) == Address(*found)
    assert announced_at(str(announced_at(text))) == Address(*found)


@pytest.mark.parametrize("text", ["203.0.113.7", ":7070", "h:0", "h:65536", "h:port", "h:-1"])
def test_an_announcement_without_a_host_or_a_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--announce '.*' is not where others reach this machine: write HOST:PORT"):
        announced_at(text)


def test_a_machine_without_workers_and_without_a_port_is_refused(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match="nothing to do but to relay: give it --port, or --announce"):
        CliRunner().invoke(cli.app, ["agent", JOIN, "--workers", "0", "--", str(script)], catch_exceptions=False)

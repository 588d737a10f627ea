"""Engines before they are used: by name, with their options, and what they are told to start."""

from pathlib import Path

import pytest

from varuna.cli.agent import invited
from varuna.cli.cluster.engine_options import nodes_of
from varuna.core.errors import UsageError
from varuna.fleet.engines.engine import AgentCommand
from varuna.fleet.engines.registry import kind_of, kinds
from varuna.fleet.net.join_string import JOIN_VARIABLE
from varuna.fleet.run_folder.join_file import keep_join

JOIN = f"varuna://{'t' * 20}@10.0.0.1:7070/{'ab' * 32}"


def test_an_agents_command_line_has_no_secret_and_is_one_that_agents_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = AgentCommand(join=JOIN, script=Path("/srv/train.py"), args=("--lr", "1"), workers=4)
    file = keep_join(tmp_path, command.join)
    argv = command.argv(join_file=str(file), state_dir="/state")
    assert argv[-11:] == [
        *("agent", "--join-file", str(file), "--state-dir", "/state", "--workers", "4"),
        *("--", "/srv/train.py", "--lr", "1"),
    ]
    assert file.stat().st_mode & 0o077 == 0
    assert str(invited(["train.py"], file)[0]) == JOIN
    assert JOIN not in repr(command)
    assert command.run == "abababab"
    monkeypatch.setenv(JOIN_VARIABLE, command.environ()[JOIN_VARIABLE])
    assert invited(["train.py"], None)[0].token == "t" * 20


def test_an_engines_first_option_may_follow_its_name_and_unknown_names_list_what_there_is() -> None:
    for name, kind in kinds().items():
        found, where = kind_of(f"{name}:there:1")
        assert (found, where) == (kind, "there:1")
        first = kind.options[0].name
        assert kind.values(where, {})[first] == "there:1"
        with pytest.raises(UsageError, match="given twice"):
            kind.values(where, {first: "elsewhere"})
        assert kind.growth(2, 8).most == 8
    with pytest.raises(UsageError, match=r"(?s)no engine is called 'lsf'.*local.*aws"):
        kind_of("lsf:queue")


def test_nodes_are_two_numbers_or_one() -> None:
    assert nodes_of("4:32", "aws:a") == (4, 32)
    assert nodes_of("8", "aws:a") == (8, 8)
    with pytest.raises(UsageError, match=r"--on aws:a needs --nodes .* 4:32"):
        nodes_of("4-8", "aws:a")

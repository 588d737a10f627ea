"""A machine becomes part of a run, and becomes part of it again; places where the JOIN string may be."""

from pathlib import Path

import pytest

from varuna.cli.agent import invited
from varuna.core.errors import FleetError, UsageError
from varuna.fleet.agent import join as module
from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
from varuna.fleet.agent.join import serve_as_agent
from varuna.fleet.net.client import ManagerRemote, ManagerReply, UnreachableError, VoidSecretError
from varuna.fleet.net.join_string import JOIN_VARIABLE, JoinString
from varuna.fleet.net.protocol import JoinRequest
from varuna.fleet.run_folder.registry import Registry
from varuna.fleet.workers.launcher import Launcher

JOIN = f"varuna://{'t' * 20}@10.0.0.1:7070/{'ab' * 32}"


class JoinServer:
    """A manager's server, in memory: agents come with a token, and are refused when their secret is void."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry, self.home = Registry(folder), AgentFolder(folder / "home")
        self.lost_answers, self.ran, self.told = 0, list[str](), list[str]()
        monkeypatch.setattr(module, "fetch_certificate", lambda invitation: "PEM")
        monkeypatch.setattr(
            AgentFolder, "read", lambda home: _card(home.folder / "agent.json")
        )  # "PEM" is not a certificate
        monkeypatch.setattr(ManagerRemote, "post", self.post)

    def post(self, path: str, body: dict[str, object]) -> ManagerReply:
        wanted = JoinRequest.model_validate(body)
        node = self.registry.join(wanted.token, wanted.hostname, wanted.secret_sha256)
        if self.lost_answers:
            self.lost_answers -= 1
            raise UnreachableError("the connection broke.")
        return ManagerReply(201, f'{{"node": "{node}"}}'.encode(), {})

    def run(self, card: AgentIdentity) -> int:
        try:
            self.registry.check(card.identity.node, card.identity.secret)
        except FleetError as error:
            raise VoidSecretError(str(error)) from error
        self.ran.append(card.identity.node)
        return 0

    def serve(self, token: str) -> int:
        invitation = JoinString(host="h", port=1, fingerprint="ab" * 32, token=token)
        return serve_as_agent(lambda: invitation, self.home, self.run, self.told.append, pause_s=0.0)


def _card(path: Path) -> AgentIdentity | None:
    return AgentIdentity.model_validate_json(path.read_bytes()) if path.exists() else None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinServer:
    return JoinServer(tmp_path, monkeypatch)


def test_an_answer_that_is_lost_costs_no_token(server: JoinServer) -> None:
    server.lost_answers = 2
    assert server.serve(server.registry.mint()) == 0
    assert len(server.ran) == 1
    assert server.told == ["the connection broke. Trying again."] * 2
    assert not (server.home.folder / "joining.json").exists()


def test_a_machine_whose_secret_is_void_joins_with_a_new_token_and_with_no_old_one(server: JoinServer) -> None:
    first = server.registry.mint()
    assert server.serve(first) == 0
    assert server.serve("never looked at, since the card is good") == 0
    server.registry.revoke(server.ran[0], "drained")  # while its agent was down
    with pytest.raises(VoidSecretError, match="join again with a new token"):
        server.serve(first)
    assert server.serve(server.registry.mint()) == 0
    assert len(set(server.ran)) == 2
    assert "Joining again" in server.told[-1]
    server.registry.close()


def test_the_join_string_may_be_where_no_other_user_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "join").write_text(JOIN + "\n")
    monkeypatch.delenv(JOIN_VARIABLE, raising=False)
    for words, file in ([JOIN, "train.py", "--lr"], None), (["train.py", "--lr"], tmp_path / "join"):
        invitation, rest = invited(words, file)
        assert (invitation.token, rest) == ("t" * 20, ["train.py", "--lr"])
    monkeypatch.setenv(JOIN_VARIABLE, JOIN)
    assert invited(["train.py"], None)[0].token == "t" * 20
    with pytest.raises(UsageError, match="cannot read --join-file"):
        invited(["train.py"], tmp_path / "missing")
    with pytest.raises(UsageError, match="what to run") as raised:
        invited([], None)
    assert "t" * 20 not in str(raised.value)
    launcher = Launcher([], environment={}, run_dir=tmp_path, on_exit=lambda event: None, write=lambda line: None)
    assert JOIN_VARIABLE not in launcher._environment


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path: Path) -> None:
    """As on a read-only disk, also that of a machine which has joined before."""
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file is not writable \(.*--state-dir"):
        AgentFolder(tmp_path / "file" / "state")
    home = AgentFolder(tmp_path / "state")
    (tmp_path / "state" / "lock").mkdir()
    with pytest.raises(UsageError, match=r"state/lock is not writable"):
        home.own()
    (tmp_path / "state" / "joining.json.new").mkdir()
    with pytest.raises(UsageError, match=r"joining.json.new is not writable"):
        home.attempt("0" * 64, "1" * 64)

"""Machines that meet, over real TLS: who is let in, what comes next, who is missing."""

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.extras.doctor.judging.test_judge import WELL
from varuna.core.errors import FleetError
from varuna.core.version import __version__
from varuna.extras.doctor.judging.facts import LinkFacts, ReachFacts
from varuna.extras.doctor.meeting import guest as guests
from varuna.extras.doctor.meeting.guest import Guest, ProbePort, try_all
from varuna.extras.doctor.meeting.manager_seen import find
from varuna.extras.doctor.meeting.meeting import (
    LINKS_S,
    REACH_S,
    SILENT_S,
    Arrival,
    MachineMeeting,
    MeetingRequest,
    Next,
    Report,
)
from varuna.fleet.net.client import ManagerRemote


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Scene:
    """A meeting of three, and a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.meeting = MachineMeeting("127.0.0.1", 0, 3, clock=self.clock)
        self.remote = ManagerRemote(
            "127.0.0.1", self.meeting.port, self.meeting.certificate_pem, self.meeting.token, answer_s=20.0
        )

    def arrive(self, name: str, version: str = __version__, **more: Any) -> Any:
        arrival = Arrival(facts=WELL.model_copy(update={"name": name}), door=4000).model_dump(mode="json")
        knock = MeetingRequest(varuna=version, name=name, arrival={**arrival, **more})
        return self.remote.post("/arrive", knock.model_dump())

    def next(self, rank: int) -> Next:
        return Next.model_validate_json(self.remote.get(f"/next/{rank}").body)

    def report(self, rank: int, phase: str, **found: Any) -> None:
        assert self.remote.post(f"/report/{rank}/{phase}", Report(**found).model_dump()).status == 200


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.meeting.close()


def test_who_has_no_token_or_another_version_is_told_why_and_counted(scene: Scene) -> None:
    stranger = ManagerRemote("127.0.0.1", scene.meeting.port, scene.meeting.certificate_pem, "wrong")
    assert stranger.get("/meeting").status == 401
    with pytest.raises(FleetError, match="another check"):
        Guest(stranger, "127.0.0.1", print).welcome()
    refused = scene.arrive("old", "0.0.1", facts={"a field": "of another version"})
    assert refused.status == 409
    assert b"install the same one" in refused.body
    assert scene.meeting.facts().others == {"old": "0.0.1"}
    assert scene.arrive("broken", facts=1).status == 400
    assert find(scene.meeting.invitation("127.0.0.1")).is_meeting


def test_a_clock_that_is_off_is_seen_from_both_sides_of_the_wire(scene: Scene) -> None:
    slow = Guest(scene.remote, "127.0.0.1", print, wall_clock=lambda: time.time() - 3600)
    assert slow.welcome()[1] == pytest.approx(-3600, abs=5)


def test_parts_follow_when_all_have_told_and_pairs_are_those_that_connect_both_ways(scene: Scene) -> None:
    for name in ("a", "b", "b"):
        assert scene.arrive(name).status == 200
    assert scene.meeting.names() == ("a", "b", "b#2")
    assert scene.meeting.advance() == "reach"
    assert scene.arrive("late").status == 409
    good, bad = ReachFacts(took_s=0.1), ReachFacts(problem="refused")
    scene.report(0, "reach", reaches={"b": good, "b#2": good})
    scene.report(1, "reach", reaches={"a": good, "b#2": good})
    assert scene.meeting.advance() == "reach"
    scene.report(2, "reach", reaches={"a": good, "b": bad})
    assert scene.meeting.advance() == "links"
    assert scene.next(0).pairs == ((0, 1), (0, 2))
    for rank in range(3):
        scene.report(rank, "links", links={"a": LinkFacts(bytes_per_s=1.0)})
    assert scene.meeting.advance() == "done"
    assert scene.next(1).healthy is None
    scene.meeting.tell_verdict(False)
    assert not scene.meeting.all_told()
    assert [scene.next(rank).healthy for rank in range(3)] == [False] * 3
    assert scene.meeting.all_told()


def test_who_is_silent_or_does_not_report_is_named_and_not_waited_for(scene: Scene) -> None:
    for name in ("a", "b", "c"):
        scene.arrive(name)
    assert scene.meeting.advance() == "reach"
    scene.clock.now_s = SILENT_S + 0.1
    for rank in (0, 1):
        scene.next(rank)
        scene.report(rank, "reach", reaches={})
    assert scene.meeting.advance() == "links"
    assert "connected to others" in scene.meeting.facts().lost["c"]
    scene.report(0, "links", links={})
    scene.clock.now_s += LINKS_S + 0.1
    scene.next(0)
    scene.next(1)
    assert scene.meeting.advance() == "done"
    assert list(scene.meeting.facts().lost) == ["c", "b"]
    assert REACH_S < LINKS_S


@pytest.mark.nightly
def test_a_key_of_somebody_who_is_gone_is_not_waited_for(scene: Scene) -> None:
    for name in ("a", "b", "c"):
        scene.arrive(name)
    scene.meeting.advance()
    assert scene.remote.get("/keys/at/x/2?of=2").status == 404
    scene.clock.now_s = SILENT_S + 0.1
    scene.next(0)
    scene.meeting.advance()
    assert scene.remote.get("/keys/at/x/2?of=2").status == 410


@pytest.mark.nightly
def test_a_guest_whose_meeting_ends_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "SILENT_S", 0.0)
    monkeypatch.setattr(guests, "TorchChild", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(guests, "look_at_machine", lambda child, wanted: WELL)
    guest = Guest(scene.remote, "127.0.0.1", lambda line: scene.meeting.close())  # once it has come
    with pytest.raises(FleetError, match=r"first machine, at 127\.0\.0\.1:.* stopped answering"):
        guest.attend()


def test_doors_answer_those_who_know_the_secret_and_closed_ones_are_told_apart() -> None:
    door, other = ProbePort("127.0.0.1", "s"), ProbePort("127.0.0.1", "another")
    closed = ProbePort("127.0.0.1", "s")
    closed.close()
    doors = {name: ("127.0.0.1", each.port) for name, each in {"b": door, "c": other, "d": closed}.items()}
    found = try_all(doors, "s", "127.0.0.1")
    assert found["b"].problem == ""
    assert "another process" in found["c"].problem
    assert "refused" in found["d"].problem
    door.close()
    other.close()

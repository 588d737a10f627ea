"""Nodes of a Ray cluster that get an agent, and the error where Ray is missing. Ray itself: see the scenarios."""

import sys
from pathlib import Path

import pytest

from varuna.core.errors import UsageError
from varuna.extras.ray.placement import Node, NodeHistory, NodePlace, places
from varuna.fleet.engines.engine import EnginePlace
from varuna.fleet.engines.registry import kind_of

HEAD, BIG, SMALL = Node("head", "10.0.0.1", 8, is_head=True), Node("big", "10.0.0.2", 8), Node("small", "10.0.0.3", 4)


def test_each_node_gets_one_agent_with_all_of_it_and_the_head_comes_last() -> None:
    found = places([HEAD, SMALL, BIG], taken=(), avoided=(), missing=3, workers=None)
    assert found == [NodePlace(BIG, 8), NodePlace(SMALL, 4), NodePlace(HEAD, 8)]
    assert places([HEAD, SMALL, BIG], taken={"big"}, avoided={"small"}, missing=2, workers=None) == [NodePlace(HEAD, 8)]
    assert places([SMALL, BIG], taken=(), avoided=(), missing=2, workers=6) == [NodePlace(BIG, 6)]
    assert places([BIG], taken=(), avoided=(), missing=0, workers=None) == []
    assert places([Node("none", "10.0.0.4", 0)], taken=(), avoided=(), missing=1, workers=None) == []


def test_a_node_whose_agent_failed_is_tried_again_ever_later_and_one_that_was_released_never() -> None:
    history, now_s, pauses = NodeHistory(), 0.0, []
    for _ in range(4):
        history.started("a", now_s)
        history.ended("a", 2, "no script", now_s)
        assert history.avoided(now_s) == {"a"}
        begin_s = now_s
        while history.avoided(now_s):
            now_s += 1.0
        pauses.append(now_s - begin_s)
    assert pauses == [2.0, 4.0, 8.0, 16.0]
    assert history.complaint({"a"}) == "no script"
    assert history.complaint({"b"}) == ""
    assert history.is_hopeless({"a"})
    assert not history.is_hopeless({"a", "b"})
    history.started("a", now_s)
    history.ended("a", None, "it was killed", now_s + 1000.0)  # it worked for long
    assert history.complaint({"a"}) == ""
    history.ended("b", 0, "", now_s)
    assert "b" in history.avoided(now_s + 1e6)


def test_without_ray_people_are_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    kind, _ = kind_of("ray")
    place = EnginePlace(run_dir=tmp_path / "gpt2", most=2)
    assert kind.elsewhere is not None
    with pytest.raises(UsageError, match=r"pip install ray==VERSION"):
        kind.elsewhere(place, kind.values("", {}), ["run"])
    with pytest.raises(UsageError, match="'a/b' is not a name"):
        kind.elsewhere(place, kind.values("a/b", {}), ["run"])
    for wrong in ("many", "0", "nan"):
        with pytest.raises(UsageError, match="--cpus-per-worker"):
            kind.make(place, kind.values("", {"cpus-per-worker": wrong}))

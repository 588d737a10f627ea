"""Words and ends of waits: by facts alone, and among ranks."""

import bdb
import os
import re
import threading
import time
from typing import Any

import pytest
import torch

from tests.unit.engine.ranks import Setup
from tests.waiting import wait_for
from varuna.core.errors import LinkError
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.peer_activity import watch_peers
from varuna.engine.base.transport import Group, Work
from varuna.engine.base.wait_bounds import (
    Awaited,
    Doing,
    Heard,
    Patience,
    Scene,
    Waiting,
    doing_of,
    heard_after,
    overdue,
)
from varuna.engine.pipeline.reduce import TIED_TAG
from varuna.engine.worker.heartbeat import Whereabouts, whereabouts
from varuna.engine.worker.session import Session

PATIENCE = Patience()
GRADIENT = Awaited("the gradient of 0B3 (step 12)", (1,))
WAITING = Waiting(7, 100.0, lambda: GRADIENT)
BUSY = Doing(text="runs the code of the training loop after step 11")
VOTING = Doing(text="runs step 12: waits for the vote on step 12 from ranks 0 and 1", on=(0, 1), wait=4)


def scene(*heard: Heard) -> Scene:
    """Rank 0 of three, 300 s of patience with a step."""
    return Scene("rank 0 (stage 0)", 0, range(3), dict(enumerate(heard, 1)), PATIENCE.stalled_after_s(1.0))


def since(doing: Doing, since_s: float, *, read_s: float = 1e6, alive_s: float | None = None) -> Heard:
    return Heard(doing, since_s, read_s if alive_s is None else alive_s, read_s)


def test_patience_follows_from_what_a_step_takes() -> None:
    assert PATIENCE.stalled_after_s(0.0) == 300
    assert PATIENCE.stalled_after_s(2.0, 60.0) == 1200
    assert PATIENCE.told_s < 60


def test_a_wait_names_whom_it_is_for_and_what_they_do_those_at_work_first() -> None:
    said = scene(since(VOTING, 0), since(BUSY, 0)).describe_wait(Awaited("the vote on step 12", (1, 2)), 31.2)
    assert said == (
        "rank 0 (stage 0) has waited 31 s for the vote on step 12 from ranks 1 and 2 (rank 2: runs the code of the "
        "training loop after step 11; rank 1: runs step 12: waits for the vote on step 12 from ranks 0 and 1)"
    )
    assert (
        scene().describe_wait(Awaited("the samples of 0F3"), 40)
        == "rank 0 (stage 0) has waited 40 s for the samples of 0F3"
    )


def test_a_rank_at_work_is_waited_for_as_long_as_it_gives_signs_of_life() -> None:
    watched = scene(since(BUSY, 0), since(VOTING, 0))
    assert watched.fault(WAITING, 100 + 86_399, PATIENCE) is None
    fault = watched.fault(WAITING, 100 + 86_400, PATIENCE)
    assert fault is not None
    assert "(rank 1: runs the code of the training loop after step 11)" in fault


def test_a_circle_of_waits_ends_and_is_named() -> None:
    other = Doing(text="runs step 12: waits for the activation of 1F3 (step 12) from rank 0", on=(0,), wait=9)
    watched = scene(since(other, 110, read_s=409), since(VOTING, 120, read_s=421))
    assert watched.fault(WAITING, 430, PATIENCE) is None  # known since 120, and for rank 1 until 409
    watched = scene(since(other, 110, read_s=420), since(VOTING, 120, read_s=421))
    assert watched.fault(WAITING._replace(since_s=130.0), 450, PATIENCE) is None  # this rank has just begun to wait
    fault = watched.fault(WAITING, 430, PATIENCE)
    assert fault is not None
    assert fault.startswith(
        "rank 0 (stage 0) waited 330 s for the gradient of 0B3 (step 12) from rank 1. For 300 s every rank has waited "
        "for another one (rank 1: runs step 12: waits for the activation of 1F3 (step 12) from rank 0; rank 2: runs "
        "step 12: waits for the vote on step 12 from ranks 0 and 1; rank 0: waits for the gradient of 0B3 (step 12) "
        "from rank 1)"
    )


@pytest.mark.parametrize(
    "others",
    [
        (since(VOTING, 0),),  # a rank was not heard
        (since(VOTING, 0), since(BUSY, 0)),  # or is at work
        (since(VOTING, 0), since(VOTING, 0, alive_s=1e6 - 61)),  # or cannot tell
    ],
)
def test_without_everybodys_word_nothing_is_a_circle(others: tuple[Heard, ...]) -> None:
    assert scene(*others).fault(WAITING, 50_000, PATIENCE) is None


def test_ranks_of_which_nothing_is_known_may_be_at_work_for_two_hours() -> None:
    assert scene().fault(WAITING, 100 + 7_199, PATIENCE) is None
    fault = scene().fault(WAITING, 100 + 7_200, PATIENCE)
    assert fault is not None
    assert "from rank 1, and nothing arrived. The peer may be frozen or cut off" in fault


def test_who_waits_for_its_own_work_is_in_no_circle() -> None:
    own = Waiting(1, 0.0, lambda: Awaited("the samples of 0F3 (step 12)"))
    assert scene(since(VOTING, 0), since(VOTING, 0)).fault(own, 50_000, PATIENCE) is None


def test_a_device_that_hangs_is_given_up_after_what_a_step_may_take() -> None:
    hangs = Waiting(1, 0.0, lambda: Awaited("the device to finish 0F3 of step 12", by_device=True))
    assert scene().fault(hangs, 299, PATIENCE) is None
    fault = scene().fault(hangs, 300, PATIENCE)
    assert fault is not None
    assert fault.startswith("rank 0 (stage 0) waited 300 s for the device to finish 0F3 of step 12: it hangs.")


def test_a_silent_rank_is_given_up_if_it_is_waited_for() -> None:
    silent, lively = since(BUSY, 0, read_s=900, alive_s=300), since(BUSY, 0, read_s=900)
    fault = scene(silent, lively).fault(WAITING, 901, PATIENCE)
    assert fault is not None
    assert "and rank 1 gave no sign of life for 600 s: frozen or cut off" in fault
    assert scene(lively, silent).fault(WAITING, 901, PATIENCE) is None


def test_another_wait_is_progress_and_another_tick_a_sign_of_life() -> None:
    first = heard_after(None, Doing(text="", on=(1,), wait=1, tick=1), 10)
    same = heard_after(first, Doing(text="", on=(1,), wait=1, tick=2), 20)
    assert (same.since_s, same.alive_s, same.silent_s) == (10, 20, 0)
    assert heard_after(same, Doing(text="", on=(1,), wait=2, tick=3), 30).since_s == 30
    assert heard_after(same, Doing(text="", wait=1, tick=3), 30).since_s == 30
    silent = heard_after(same, Doing(text="", on=(1,), wait=1, tick=2), 30)
    assert (silent.since_s, silent.silent_s) == (10, 10)


def test_a_rank_tells_what_it_waits_for_and_its_activity() -> None:
    assert doing_of("runs step 12", WAITING) == Doing(
        text="runs step 12: waits for the gradient of 0B3 (step 12) from rank 1", on=(1,), wait=7
    )
    assert doing_of("step 12: 0F1", None, tick=3) == Doing(text="step 12: 0F1", tick=3)


def test_a_store_that_is_away_makes_nobody_silent() -> None:
    class Away:
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    inbox = Inbox(Patience(word_s=0.01), ranks=range(2))
    inbox.heard = {1: since(BUSY, 0)}
    watch_peers(inbox, Away(), 0, 0, range(2), lambda tick: Doing(text="", on=(1,), tick=tick), give_up=print)
    try:
        wait_for(lambda: not inbox.heard, 5)
    finally:
        inbox.abort(LinkError("over"))


# -- among ranks -----------------------------------------------------------------------------------------------


def test_a_deadlock_of_three_ranks_is_told_and_ended_with_all_their_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    receive = Group.receive

    def astray(group: Group, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        return receive(group, buffer, peer, tag + 1000 if tag >= TIED_TAG else tag)

    monkeypatch.setattr(Group, "receive", astray)
    setup = Setup(patience=Patience(word_s=0.05, told_s=0.5, look_s=0.1, stalled_s=1.0, steps=0.0))
    with pytest.raises(LinkError, match=r"every rank has waited for another one \(.*; ") as raised:
        setup.run(3, 1, steps=2)
    assert "waits for the gradients of tied parameters (step 0) from rank 2" in str(raised.value)
    assert re.search(r"rank 1: (runs step 0: )?waits for the vote on step 0 from ranks 0 and 2", str(raised.value))
    said = capsys.readouterr().err
    assert (
        len(re.findall(r"rank 1 \(stage 1\) has waited \d s for the vote on step 0 from ranks 0 and 2 \(", said)) == 1
    )


def test_a_link_that_breaks_in_a_deadlock_is_told_with_who_waited_for_whom() -> None:
    inbox = Inbox(Patience(told_s=0.01, stalled_s=1.5), ranks=range(2), tell=lambda said: inbox.abort(broken))
    inbox.expect_step(0.0)
    broken = LinkError("the link of rank 0 with rank 1 (stage 1) broke while receiving: Connection closed by peer")
    now_s = time.monotonic()
    inbox.heard = {1: since(Doing(text="runs step 3: waits for the vote", on=(0,)), now_s, read_s=now_s + 1)}
    with pytest.raises(
        LinkError, match=r"broke .* closed by peer\. For 1 s every rank .*rank 1: runs step 3: waits for"
    ):
        inbox.take("gradient", lambda: GRADIENT)
    inbox.heard = {}
    with pytest.raises(LinkError, match=r"closed by peer$"):
        inbox.take("gradient", lambda: GRADIENT)


@pytest.mark.nightly
def test_code_of_the_training_loop_may_take_longer_than_any_bound_of_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    setup = Setup(patience=Patience(word_s=0.05, told_s=0.5, stalled_s=0.7, steps=0.0))
    plain = setup.losses(2, 1, steps=2)
    losses: dict[int, list[float]] = {0: [], 1: []}
    steps = Session.steps

    def slow(session: Session) -> Any:
        for committed in steps(session):
            losses[0 if committed.is_main else 1].append(committed.totals.loss)
            yield committed
            if committed.is_main and committed.step == 0:
                time.sleep(2.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "steps", slow)
        setup.run(2, 1, steps=2)
    assert losses[0] == losses[1] == [loss for loss, _ in plain]
    said = capsys.readouterr().err
    assert re.search(
        r"rank 1 \(stage 1\) has waited \d s for the activation of 1F0 \(step 1\) from rank 0 "
        r"\(rank 0: runs the code of the training loop after step 0, at .*test_wait_bounds\.py:\d+\)",
        said,
    )


# -- a rank whose own work does not end ---------------------------------------------------------------------------

LOOP = Doing(text="runs the code of the training loop after step 11, at train.py:42", work="after step 11")


def test_a_rank_ends_itself_only_if_its_work_lasts_far_longer_than_any_before_and_others_wait_for_it() -> None:
    waits = heard_after(heard_after(None, VOTING, 10.0), VOTING, 20.0)
    why = overdue(1, LOOP, 3601.0, 3600.0, {2: waits}, PATIENCE)
    assert why is not None
    assert why.startswith(
        "ends itself, since for 3601 s it runs the code of the training loop after step 11, at train.py:42, while rank "
        "2 waits for it (rank 2: runs step 12: waits for the vote on step 12 from ranks 0 and 1)"
    )
    assert overdue(1, LOOP, 3601.0, 3600.0, {0: since(BUSY, 0), 2: waits}, PATIENCE) == why  # one is enough
    assert overdue(1, LOOP, 3599.0, 3600.0, {2: waits}, PATIENCE) is None
    assert overdue(2, LOOP, 3601.0, 3600.0, {1: waits}, PATIENCE) is None  # who waits, waits for others
    assert overdue(1, LOOP, 3601.0, 3600.0, {2: heard_after(None, VOTING, 20.0)}, PATIENCE) is None  # it has just come
    assert overdue(1, Doing(text="compiles"), 9e4, 3600.0, {2: waits}, PATIENCE) is None  # it may take its time


def test_the_bound_of_own_work_follows_from_steps_and_from_what_took_long_before() -> None:
    assert PATIENCE.busy_after_s(0.0, 1.0, 2.0) == 3600
    assert PATIENCE.busy_after_s(0.0, 60.0, 50.0) == 6000
    assert PATIENCE.busy_after_s(1800.0, 1.0) == 7200


def test_a_rank_that_loops_in_the_training_loop_is_named_with_its_line_and_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in its first round, whatever it does there; nor while somebody looks at it."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    patience = Patience(word_s=0.05, told_s=0.5, busy_s=0.7, busy_steps=0.0, busy_times=0.0)
    setup, steps = Setup(patience=patience), Session.steps
    first_s: list[float] = []

    def looping(session: Session) -> Any:
        for committed in steps(session):
            yield committed
            begin_s = time.monotonic()
            if committed.is_main and committed.step == 0:
                time.sleep(1.5)
                first_s.append(time.monotonic() - begin_s)
                assert not ended.is_set()
            while committed.is_main and committed.step == 1 and not ended.wait(0.01):
                assert time.monotonic() - begin_s < 30

    monkeypatch.setattr(Session, "steps", looping)
    setup.run(2, 1, steps=3)
    said = capsys.readouterr().err
    assert re.search(
        r"rank 1 \(stage 1\) has waited .* \(rank 0: runs the code of the training loop after step 1", said
    )
    assert re.search(
        r"rank 0 \(stage 0\) ends itself, since for \d s it runs the code of the training loop after step 1, at "
        r".*test_wait_bounds\.py:\d+, "
        r"while rank 1 waits for it \(rank 1: .* the activation of 1F0 \(step 2\) from rank 0",
        said,
    )
    assert "in looping\n    while committed.is_main" in said


def test_a_debugger_is_known_by_its_frames() -> None:
    debugger = bdb.Bdb()
    seen: list[Whereabouts] = []
    debugger.runcall(lambda: seen.append(whereabouts(threading.get_ident(), reads=False)))
    assert seen[0].is_debugged
    here = whereabouts(threading.get_ident(), reads=False)
    assert not here.is_debugged
    assert re.fullmatch(r".*test_wait_bounds\.py:\d+", here.place) or "whereabouts.py" in here.stack

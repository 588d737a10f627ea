"""Links are used once both ends have proven that they belong to the generation, and not before."""

import threading
from functools import partial

from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group, local_store
from varuna.engine.links.authentication import prove
from varuna.engine.links.groups import Groups, form_groups
from varuna.testing.threads import run_all

SECRET, OTHER = "ab" * 32, "cd" * 32


def meet(secrets: list[str], *, bound_s: float = 10.0, silent: int | None = None) -> list[str]:
    """Let the members of a group meet; return what each says of the others, empty if nothing is wrong."""
    store, said = local_store(), ["" for _ in secrets]
    done = threading.Barrier(len(secrets))

    def join(rank: int) -> None:
        group = Group(store, "g7/world", rank, len(secrets), Endpoint("127.0.0.1"))
        try:
            if rank != silent:
                prove(group, secret=secrets[rank], name="g7/world", rank=rank, bound_s=bound_s)
        except RuntimeError as error:
            said[rank] = str(error) or "?"
        done.wait(20)

    run_all([partial(join, rank) for rank in range(len(secrets))])
    return said


def test_members_recognise_each_other_and_a_stranger_is_named() -> None:
    assert meet([SECRET] * 3) == ["", "", ""]
    for said in meet([SECRET, SECRET, OTHER])[:2]:
        assert "the process that answers as member 2 of g7/world has not proven that it belongs there" in said


def test_a_stranger_who_says_nothing_is_waited_for_within_a_bound() -> None:
    assert meet([SECRET, SECRET], bound_s=0.3, silent=1)[0]


def test_a_generation_whose_members_have_different_secrets_does_not_form() -> None:
    store, failures, formed = local_store(), list[str](), list[Groups]()

    def join(rank: int) -> None:
        try:
            formed.append(
                form_groups(
                    store,
                    generation=3,
                    rank=rank,
                    members=2,
                    grid=2,
                    homes={},
                    endpoint=Endpoint("127.0.0.1"),
                    secret=(SECRET, OTHER)[rank],
                )
            )
        except RuntimeError as error:
            failures.append(str(error))

    run_all([partial(join, rank) for rank in range(2)])
    assert formed == []
    assert len(failures) == 2

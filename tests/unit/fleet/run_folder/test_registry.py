"""Tokens and secrets: each refusal has its reason, and the file holds none of them."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.unit.fleet.support import join
from varuna.fleet.net.protocol import JobIdentity
from varuna.fleet.run_folder.database import FILE
from varuna.fleet.run_folder.registry import RefusedError, Registry, hashed


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(tmp_path: Path, clock: Clock) -> Iterator[Registry]:
    registry = Registry(tmp_path, clock)
    yield registry
    registry.close()


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RefusedError) as caught:
        call()
    return str(caught.value)


def test_a_token_lets_one_machine_in_once(registry: Registry) -> None:
    token = registry.mint()
    identity = join(registry, token, "GPU box_7.example.org")
    assert identity.node == "n0-gpu-box-7"
    registry.check(identity.node, identity.secret)
    registry.mint()  # spent tokens are remembered for as long as they could have been good
    assert "has been used" in refusal(lambda: join(registry, token, "b"))
    assert "unknown" in refusal(lambda: join(registry, "guess", "b"))


def test_a_token_for_many_machines_is_minted_on_purpose_and_expires(registry: Registry, clock: Clock) -> None:
    token = registry.mint(uses=3, life_s=60)
    names = [join(registry, token, "vm").node for _ in range(2)]
    assert names == ["n0-vm", "n1-vm"]
    clock.now_s += 61
    assert "expired" in refusal(lambda: join(registry, token, "vm"))


def test_a_clock_that_jumps_back_gives_nobody_a_second_use(registry: Registry, clock: Clock) -> None:
    token = registry.mint()
    join(registry, token, "vm")
    clock.now_s -= 1e6
    assert "used" in refusal(lambda: join(registry, token, "vm"))


def test_secrets_are_checked_and_can_be_revoked(registry: Registry) -> None:
    one, other = (join(registry) for _ in range(2))
    assert "wrong" in refusal(lambda: registry.check(one.node, other.secret))
    assert "wrong" in refusal(lambda: registry.check("n9", one.secret))
    registry.revoke(one.node, "drained")
    assert "was removed (drained)" in refusal(lambda: registry.check(one.node, one.secret))
    registry.check(other.node, other.secret)


def test_what_was_given_out_outlives_the_manager_and_is_nowhere_on_disk(tmp_path: Path, clock: Clock) -> None:
    first = Registry(tmp_path, clock)
    token, spare = first.mint(), first.mint()
    identity = join(first, token, "vm")
    first.close()
    again = Registry(tmp_path, clock)
    again.check(identity.node, identity.secret)
    assert join(again, spare, "vm").node == "n1-vm"
    again.close()
    content = b"".join(path.read_bytes() for path in tmp_path.glob(FILE + "*"))
    assert not any(secret.encode() in content for secret in (token, spare, identity.secret))
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"version": "9"}, "runs Varuna 9"), ({"script_sha256": "b"}, "same file"), ({"args_sha256": "b"}, "arguments")],
)
def test_all_agents_must_run_the_same(registry: Registry, changed: dict[str, str], said: str) -> None:
    job = JobIdentity(version="1", script="train.py", script_sha256="a", args_sha256="a")
    assert registry.agree(job) is None
    assert registry.agree(job) is None
    assert said in (registry.agree(job.model_copy(update=changed)) or "")


def test_a_lost_answer_costs_no_token_and_nobody_elses_secret_gets_the_name(registry: Registry) -> None:
    token, mine = registry.mint(), hashed("mine")
    node = registry.join(token, "vm", mine)
    assert registry.join(token, "vm", mine) == node  # again, since the answer did not come
    registry.check(node, "mine")
    assert "has been used" in refusal(lambda: registry.join(token, "vm", hashed("other")))
    registry.revoke(node, "drained")
    assert "was removed" in refusal(lambda: registry.join(token, "vm", mine))


def test_all_tokens_can_be_void_at_once_and_machines_that_joined_stay(registry: Registry, clock: Clock) -> None:
    identity = join(registry)
    tokens = [registry.mint(), registry.mint(uses=5)]
    registry.mint(life_s=1)
    clock.now_s += 2
    assert registry.void_tokens() == 2
    for token in tokens:
        assert "this token was made void" in refusal(partial(registry.join, token, "vm", hashed("x")))
    registry.check(identity.node, identity.secret)
    assert registry.revoke(identity.node, "sent away")
    assert not registry.revoke("n9", "sent away")
    assert registry.void_tokens() == 0

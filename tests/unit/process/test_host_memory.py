"""Whom the system killed for want of memory."""

from pathlib import Path

from varuna.process.host_memory import MemoryKills


def test_each_kill_is_found_once_and_those_before_a_start_are_others(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"

    def killed(count: int) -> None:
        counters.write_text(f"nr_free_pages 7\noom_kill {count}\n")

    killed(3)
    kills = MemoryKills(counters)
    assert not kills.has_one()
    killed(5)
    assert [kills.has_one() for _ in range(3)] == [True, True, False]
    killed(6)
    kills.begin()
    assert not kills.has_one()


def test_where_the_system_does_not_say_nobody_was(tmp_path: Path) -> None:
    kills = MemoryKills(tmp_path / "none")
    assert not kills.has_one()
    (tmp_path / "none").write_text("nonsense\n")
    assert not kills.has_one()

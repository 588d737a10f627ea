"""Losses of connections that begin slowly after each pause, as TCP does unless told otherwise (RFC 5681, 4.1). Pure."""

import math
from collections.abc import Iterator

from varuna.extras.doctor.judging.facts import FleetFacts, LinkFacts
from varuna.extras.doctor.judging.finding import Finding, listed, warning
from varuna.extras.doctor.judging.judge_machine import delay, speed

SETTING = "net.ipv4.tcp_slow_start_after_idle"
FIRST_BYTES = 10 * 1448.0
"""That TCP sends before anything was acknowledged: ten segments of usual packets (RFC 6928)."""
_MUCH_S = 5e-3
"""More than a sender on a usual network loses."""


def judge_pauses(facts: FleetFacts) -> Iterator[Finding]:
    """Judge links between far machines, on which a message takes noticeably longer after a pause."""
    slowly = {machine.name for machine in facts.machines if machine.starts_slowly}
    late = [
        (seconds, a, b, link)
        for b, row in facts.links.items()
        for a, link in row.items()
        if a in slowly and not link.problem and (seconds := lost_s(link)) > _MUCH_S
    ]
    if not late:
        return
    worst_s, a, b, link = max(late, key=lambda row: row[0])
    begin = "link begins" if len(late) == 1 else "links begin"
    text = (
        f"{len(late):,} {begin} slowly after a pause: from {a} to {b} ({speed(link.bytes_per_s)}, "
        f"{delay(link.latency_s)}) the next message takes up to {delay(worst_s)} longer"
    )
    names = sorted({name for _, name, _, _ in late})
    yield warning("tcp", text, f"As root, on {listed(names)}: sysctl -w {SETTING}=0")


def lost_s(link: LinkFacts, *, first_bytes: float = FIRST_BYTES) -> float:
    """Return the seconds that a message loses after a pause of seconds: fewer after a shorter one, none after 0.2 s.

    What may be under way begins anew, and doubles with each round trip until it is enough.
    """
    round_trip_s = 2 * link.latency_s
    enough_bytes = link.bytes_per_s * round_trip_s
    if enough_bytes <= first_bytes:
        return 0.0
    sent = 1 - first_bytes / enough_bytes
    return round_trip_s * (math.log2(enough_bytes / first_bytes) - sent)

"""Channels of messages to a neighbouring stage: a link of their own, or lines of hosts that links share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from varuna.simulator.costs import LinkCosts, mean_travel_s


class Arrivals:
    """Arrivals of a link's messages: their times ascend, since messages stay in order."""

    __slots__ = ("delay_s", "delays_s", "last_s", "times_s")

    def __init__(self, times_s: list[float], link: LinkCosts, delays_s: Sequence[float] | None) -> None:
        """Begin without any.

        Args:
            times_s: of the receiver.
            link: whose latency and mean jitter each message takes.
            delays_s: of each message, instead.
        """
        self.times_s = times_s
        self.delay_s = mean_travel_s(link)
        self.delays_s: Iterator[float] | None = None if delays_s is None else iter(delays_s)
        self.last_s = 0.0

    def add(self, left_s: float) -> float:
        """A message has left whole; returns its arrival in seconds."""
        if self.delays_s is None:
            arrival_s = left_s + self.delay_s
        else:
            arrival_s = max(left_s + next(self.delays_s), self.last_s)
            self.last_s = arrival_s
        self.times_s.append(arrival_s)
        return arrival_s


class HostLine:
    """Of a host, one way: what passes at once has an equal part of it, as connections of TCP do."""

    __slots__ = ("flows",)

    def __init__(self) -> None:
        self.flows: list[SharedLink] = []
        """with a message on its way"""


class HostLines(NamedTuple):
    """Of a host, both ways."""

    out: HostLine
    into: HostLine


def busiest_line_s(links: Sequence[LinkCosts]) -> float:
    """Seconds for which the messages of a micro-batch that leave a host occupy its line, on the busiest one."""
    crossing = [link for link in links if link.line_share]
    gradients_s = [0.0, *(link.gradient_s * link.line_share for link in crossing)]  # to the host before
    activations_s = [*(link.activation_s * link.line_share for link in crossing), 0.0]
    return max(gradient_s + activation_s for gradient_s, activation_s in zip(gradients_s, activations_s, strict=True))


def lines_of(links: Sequence[LinkCosts]) -> list[HostLines]:
    """Those of each stage's host: a link whose messages pass no line stays within a host."""
    found = [HostLines(HostLine(), HostLine())]
    for link in links:
        found.append(HostLines(HostLine(), HostLine()) if link.line_share else found[-1])
    return found


class SharedLink:
    """Messages of a link that pass the lines of two hosts, one after another."""

    __slots__ = ("done_s", "left_s", "lines", "number", "rate", "serialisation_s", "share", "since_s", "waiting")

    def __init__(self, number: int, serialisation_s: float, share: float, lines: tuple[HostLine, HostLine]) -> None:
        """Begin without any.

        Args:
            number: of this flow among all.
            serialisation_s: of a message that is alone.
            share: of the lines that it takes then.
            lines: of its sender's host and its receiver's.
        """
        self.number, self.serialisation_s, self.share, self.lines = number, serialisation_s, share, lines
        self.waiting = 0
        """messages that have not left whole"""
        self.left_s = self.since_s = self.done_s = 0.0
        self.rate = 1.0

    def add_message(self, now_s: float) -> "list[SharedLink]":
        """Take a message; returns flows whose ``done_s`` has changed."""
        self.waiting += 1
        if self.waiting > 1:
            return []
        for line in self.lines:
            line.flows.append(self)
        self.left_s, self.since_s, self.rate = self.serialisation_s, now_s, 0.0
        return self._shared(now_s)

    def finish(self, now_s: float) -> "list[SharedLink]":
        """A message has left whole; returns flows whose ``done_s`` has changed."""
        self.waiting -= 1
        if not self.waiting:
            for line in self.lines:
                line.flows.remove(self)
            return self._shared(now_s)
        self.left_s, self.since_s = self.serialisation_s, now_s
        self.done_s = now_s + self.left_s / self.rate
        return [self]

    def _shared(self, now_s: float) -> "list[SharedLink]":
        """Divide the lines anew; returns flows that are faster or slower now."""
        changed = []
        for line in self.lines:
            for flow in line.flows:
                if flow is self and line is self.lines[1]:
                    continue  # it passes both
                first, second = flow.lines
                here, there = len(first.flows), len(second.flows)
                crowd = flow.share * (here if here > there else there)
                rate = 1.0 / crowd if crowd > 1.0 else 1.0
                if rate != flow.rate:
                    left_s = flow.left_s - (now_s - flow.since_s) * flow.rate
                    flow.left_s, flow.since_s, flow.rate = left_s, now_s, rate
                    flow.done_s = now_s + left_s / rate if left_s > 0.0 else now_s
                    changed.append(flow)
        return changed

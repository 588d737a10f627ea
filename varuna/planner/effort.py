"""The effort of the search for a plan: tuned figures, whose effect ``benchmarks/search_quality.py`` measures."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Figures without a unit are shares of a time; forwards are counted over all stages of a replica."""

    # Guesses: which D are tried for a depth P.
    replicas: int = 3
    """D's for a depth."""
    near: float = 1.15
    """Above the best guess, D's of half or twice as many replicas are tried."""
    as_good: float = 1.02
    """The same for all other D's."""
    near_if_short: float = 1.6
    """The same for any D whose step is short."""
    short_forwards: int = 1_000
    """A step of so few is simulated quickly, and its time depends on the order of its actions."""
    faster: float = 1.1
    """Steps of the search over D: some rings are slower than a few more micro-batches."""

    # Best first: which plans are built and simulated.
    optimism: float = 0.97
    """Guesses may be a little above what their shape becomes."""
    others: float = 0.95
    """Other in-flight depths of a shape may take this much, against those that are most often the best."""
    anomaly: float = 0.99
    """Other in-flight depths must promise this much, against the best of their shape, to be simulated."""
    surprise: float = 1.2
    """Nothing that promises so much more than the best plan becomes better than it."""
    spare_forwards: int = 4_000
    """Until this many are simulated, plans that should lose are tried too."""
    most_forwards: int = 60_000
    """Beyond, the best plan so far is good enough: low bounds on odd networks must not cost minutes."""

    # Neighbours of short plans.
    walked_within: float = 1.35
    """Plans that take so much longer than the best may become the best by a few moves."""
    walked_forwards: int = 16_000
    """Simulated on all walks from front-loaded plans, and as many from others."""
    forwards_of_a_walk: int = 4_000
    """Simulated on one walk."""
    factors: tuple[int, ...] = (1, 2, 3, 4)
    """Of in-flight depths; the last one is for messages that take longer than stages."""

    # How many of the last backwards are split.
    more_split: float = 1.5
    """Of P, tried beside P itself."""
    long: int = 16
    """Micro-batches per stage, beyond which the drain is too small a part of a step to be worth a simulation."""
    cheap_forwards: int = 4_000
    """So few are simulated in milliseconds: none, half of P and all are tried too."""
    dear_halves: float = 1.03
    """I and W that take this much longer than B may not pay at all."""

    def shared_by(self, searches: int) -> "Effort":
        """Of each of several searches whose plans are parts of one: together they walk as far as one alone."""
        return replace(
            self,
            walked_forwards=self.walked_forwards // searches,
            forwards_of_a_walk=self.forwards_of_a_walk // searches,
        )


EFFORT = Effort()

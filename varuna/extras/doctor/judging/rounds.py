"""Rounds of a tournament: an order of pairs in which no machine is in two measurements at once. Pure."""


def opponents(rank: int, size: int) -> tuple[int, ...]:
    """Return all others, in the order of a tournament in which each plays in every round (the circle method).

    With an odd number one rests in each round, so that for example 0, 1 and 2 play 1-2, 0-1, 2-0.
    """
    # in turn t meet the ranks whose sum is t modulo places - 1; the one that would meet itself meets the fixed last
    # one, which stands for a rest where the number of machines is odd
    places = size + size % 2
    fixed = places - 1
    found = []
    for turn in range(places - 1):
        if rank == fixed:
            other = next(r for r in range(fixed) if (2 * r) % (places - 1) == turn)
        else:
            other = (turn - rank) % (places - 1)
            if other == rank:
                other = fixed
        if other < size:
            found.append(other)
    return tuple(found)

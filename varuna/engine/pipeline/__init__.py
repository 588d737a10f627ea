"""One step of one replica's stage: ask the policy, run the action, hand on what it makes; then reduce and vote.

In: micro-batches, messages of the neighbours. Out: reduced gradients, and the vote that every rank holds. ``runtime``
is where to begin reading.
"""

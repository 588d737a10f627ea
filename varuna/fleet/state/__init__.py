"""The values of the state machine: what is known of a run, what can happen to it, what it says and tells.

Frozen, without rules of their own but what a figure means: ``stutter`` and ``morph_gain`` judge evidence.
"""

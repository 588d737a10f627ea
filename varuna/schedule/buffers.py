"""Samples, messages and inputs that a stage has at once: the engine keeps to it, and plans have memory for it."""

SAMPLES_AHEAD = 4
"""Micro-batches whose samples a rank reads ahead of their F."""

ACTIVATIONS_COMING = 3
"""Buffers for the next activations, besides those that have arrived and wait for their F.

A message goes only when its receiver has asked for it. Where lines are slow the question is under way for as long as a
message or two, since it waits for what goes the same way. Meanwhile those come that were asked for before.
"""

GRADIENTS_COMING = 3
"""Gradients that have arrived and wait for their B, plus buffers for the next; further ones stay at their sender."""

MESSAGES_LEAVING = 3
"""The most activations that a stage has sent and the next one has not taken; at this number the next F waits."""

STASH_IN_TRANSIT = 3
"""Stash entries on the device besides those that stay: the newest, being copied out; the next; and the current one."""

FROZEN_PLACES = 2
"""Sections whose streamed parameters a device has at once: the one at work, and the one that is read ahead."""

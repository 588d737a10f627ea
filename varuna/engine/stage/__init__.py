"""A stage on one rank: its sections' parameters, gradient buffers, optimizer, and computations.

In: parameters and optimizer state of sections, inputs of a micro-batch. Out: outputs, gradients, updated state. Knows
nothing of links, except for values that depend on several stages (``cross_stage``).
"""

"""Capture: an unmodified module becomes one flat graph of ATen ops, built and exported without its memory.

In: the function that builds the model, first samples. Out: ``graph.captured.Capture``, or an error in words of the
user's code. What export cannot follow by itself is helped over here, all of torch's private names included.
"""

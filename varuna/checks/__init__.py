"""Looks at a captured job before step 0, and refuses what would train another model than plain PyTorch.

In: the captured, cut model, the user's module, and a few samples. Out: nothing, or an error that names the cause; what
only looks wrong is a warning.
"""

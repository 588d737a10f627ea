"""Work between two steps that touches nothing of the training: losses, outputs and texts of other data.

In: the running generation, a model in evaluation mode, samples or prompts. Out: the same answer on every rank.
"""

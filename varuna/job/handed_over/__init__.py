"""A watch on the objects that the script has handed over to its Trainer, while the script has control.

In: the user's functions with their roles, a model and an optimizer that the script has built. Out: options that the
loop has written, to be taken over, or a refusal of what else has changed.
"""

"""Predicts a step: runs the engine's own policies against costs instead of tensors.

In: a policy for each stage, seconds and bytes. Out: when every action ran, idle shares, bytes.
"""

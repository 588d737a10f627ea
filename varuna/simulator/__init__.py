"""Predicts a step: runs the engine's own policies against costs instead of tensors."""

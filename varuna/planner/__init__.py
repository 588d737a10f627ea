"""Chooses P, D and m for the workers at hand, and says why."""

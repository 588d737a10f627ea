"""Chooses P, D and m for the available workers, and says why."""

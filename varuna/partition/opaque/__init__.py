"""Submodules that capture cannot follow: one operation of the graph each, which runs them eagerly."""

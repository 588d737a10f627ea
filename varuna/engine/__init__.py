"""Runs a plan: stage runtime, links, reduction, vote, optimizer step, generations.

In: an assignment of the membership. Out: trained sections. ``worker`` stands on ``pipeline``, that on
``stage`` and ``graphs``, those on ``links``, ``device`` and ``base``.
"""

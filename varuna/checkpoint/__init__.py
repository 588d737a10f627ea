"""Checkpoints: a file per section, and a manifest, written last, that makes them one.

``files``, ``manifest`` and ``folder`` need no torch (the manager uses them); ``shards`` and ``writer`` do.
"""

"""The device beside the host: its streams, events, pinned host memory, and how much memory it has.

On a CPU all of this is nothing: each class has a plain twin.
"""

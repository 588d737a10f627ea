"""Looks at a captured job before its first step, and refuses what would train another model than plain PyTorch.

What enters: a partitioned model, the user's own module as its constructor makes it, and the first samples. What leaves:
nothing that a run is made of. A check ends in silence, in a line for people, or in a ``ModelError`` or ``DataError``;
the run's parameters, buffers and generators are as they were. The room lies above ``engine``, since the sections are
run as the engine runs them, and below ``trainer``.
"""

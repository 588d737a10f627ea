"""A living run, looked at from outside: what its promises say should hold, and whether it does.

``gather`` reads the manager's answers, the journal, the checkpoints and this machine's sockets and disks;
``diagnose`` is pure and turns what was read into findings. Nothing here changes a run.
"""

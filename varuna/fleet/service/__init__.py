"""The manager as a process: its ports, files and signals, and where its workers live.

In come options of the command line; out comes an exit code. ``service`` is the same for all runs; ``local_workers`` and
``cluster_workers`` are what differs between ``varuna run`` and ``varuna manager``.
"""

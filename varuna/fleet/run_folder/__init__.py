"""A run's folder on disk: journal, machines and tokens in one SQLite file, logs, and the manager's address.

In: events of the run, secrets of machines. Out: the same, after a restart. Everything else may be lost.
"""

"""What a run keeps on disk: journal, machines and tokens in one SQLite file, logs, and where its manager is.

In: events of the run, secrets of machines. Out: the same, after a restart. Everything else may be lost.
"""

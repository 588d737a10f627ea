"""This process and its machine: background threads, the allocator, locks of files, signals, standard streams.

Nothing here knows of training.
"""

"""Runs on other machines, as commands: what ``varuna manager`` and ``varuna run --on ENGINE`` are made of.

In: options of the command line. Out: an exit code, once the run is over.
"""

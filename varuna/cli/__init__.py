"""The command line: thin, parses, calls, prints.

In: what people type, and environment variables. Out: text, exit codes, files that were asked for. What needs torch,
servers or the fleet is imported when it runs: ``varuna --help`` is quick.
"""

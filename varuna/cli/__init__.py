"""The command line: thin, parses, calls, prints.

In: what people type, and environment variables. Out: text, exit codes, files that were asked for. What a command needs
is imported when it runs, so that ``varuna --help`` needs no torch.
"""

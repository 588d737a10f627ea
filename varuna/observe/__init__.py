"""A run as people see it: progress lines, the view in a terminal, reports.

In: a run's events. Out: text. Nothing here decides anything.
"""

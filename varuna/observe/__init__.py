"""What happens inside a run, for people: progress lines, the view in a terminal, reports.

In: a run's events. Out: text. Nothing here decides anything.
"""

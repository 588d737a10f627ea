"""What happens inside a run, for people: progress lines, reports, Gantt pictures.

In: a run's events, and rows of simulated or measured steps. Out: text and SVG. Nothing here decides anything.
"""

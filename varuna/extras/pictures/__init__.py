"""For people who tune schedules: steps drawn, as Gantt figures, traces and simulated steps.

In: simulated steps, and measured ones as workers told them. Out: SVG, JSON, numbers. Nothing is read or written here.
"""

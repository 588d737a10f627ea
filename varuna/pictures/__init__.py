"""Steps drawn and accounted for: Gantt figures, traces, what each second went to.

In: simulated steps, and measured ones as workers told them. Out: SVG, JSON, numbers. Nothing is read or written here.
"""

"""The manager as a pure state machine: ``advance(fleet, event, now_s)`` gives the next fleet and its outputs.

In: one event and the time. Out: frozen values. One module for each kind of conclusion: exits, joins, stragglers,
preemption, planned morphs, forming a generation, commit decisions.
"""

"""The manager's shell around the state machine of ``varuna.fleet.machine``.

In: frames of agents and workers, requests of operators, exits of processes, time. Out: what the state machine decides:
frames, journal lines, checkpoints committed, machines asked for. ``fleet.service``
puts it together.
"""

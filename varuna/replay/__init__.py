"""What would this run make of that cluster: the real state machine and planner, in virtual time."""

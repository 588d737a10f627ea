"""The job that a user's script describes: a frozen, checked ``JobSpec``, and what the engine and tools get from it.

In: a Trainer's arguments, or a script. Out: a spec that is known to be right, or an error before anything is built;
a worker's session, facts for the planner and the manager.
"""

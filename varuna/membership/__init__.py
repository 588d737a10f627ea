"""Memberships of a process: the manager's (``varuna run``, an agent), torchrun's fixed world, or its own.

In: environment variables of a launcher. Out: a ``varuna.core.membership.Membership``. The only place that knows both
the engine and the fleet.
"""

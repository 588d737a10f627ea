"""Engines: what people already have that starts things on machines, and keeps so many agents of a run there.

In: an agent's command and a requested number of nodes. Out: calls of the engine's own tools. An engine is a provider
that is also told what to start; ``registry`` knows all of them by name.
"""

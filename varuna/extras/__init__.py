"""Packages that a run can do without: each serves some people, and the core imports none of them.

In: public names of the core. Out: what ``varuna.core.extras`` lists, by what asks for it.
"""

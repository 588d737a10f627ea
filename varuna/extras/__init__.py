"""What a run can do without: each package serves some people, and the core imports none of them.

In: public names of the core. Out: what ``varuna.core.extras`` lists, by what asks for it.
"""

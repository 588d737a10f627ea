"""Front ends in the shape of other libraries' trainers; nothing here is imported unless a script asks for it.

In: that library's arguments. Out: a ``varuna.Trainer``, and what that library's own code does with its results.
"""

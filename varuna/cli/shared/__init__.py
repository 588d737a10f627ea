"""Parts that several commands share: options, and how they are read.

In: what users typed. Out: values, or an error that says what to type.
"""

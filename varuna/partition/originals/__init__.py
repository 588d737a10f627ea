"""The script's own modules and what refers to them, as the copies that train have them.

In: modules that the script has built, and its functions. Out: copies, modes, and what a reference leads to.
"""

"""The user's code, watched while it runs: which line is running, which bytes are alive, what it does besides computing.

In: nothing; these are context managers and dispatch modes. Out: findings, for errors in the user's own words.
"""

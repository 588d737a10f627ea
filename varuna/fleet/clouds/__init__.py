"""Where machines come from: one small seam, asked again and again for the size that the run wants.

In: a requested number of nodes. Out: calls of a cloud's API.
"""

"""Code that capture cannot or need not follow: submodules and autograd functions, one operation of the graph each.

In: a module that export refuses. Out: an operation that runs it eagerly, with shapes, work and bytes learned from runs.
"""

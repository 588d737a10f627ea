"""The network between manager, agents and operators.

In: sockets. Out: checked messages, in order, once each; certificates that one fingerprint recognises; bounds on what a
stranger can cost.
"""

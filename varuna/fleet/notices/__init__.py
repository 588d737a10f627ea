"""Notices from a machine's cloud about its future: that it will be taken back, or may be.

In: the cloud's metadata service. Out: notices for the agent, and an answer once the machine may go.
"""

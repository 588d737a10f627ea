"""The content of a run's page: all that happened, in bounded memory; how it is now; and what changes, as it changes.

In come a run's events, each with its moment, and its fleet; out come plain values, and streams of server-sent events.
"""

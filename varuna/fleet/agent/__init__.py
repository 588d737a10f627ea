"""One machine's part in a run: it starts workers, keeps them alive, and speaks for them.

In: a JOIN string, instructions of the manager. Out: workers' messages, exits and logs, over one TLS connection that may
break at any time.
"""

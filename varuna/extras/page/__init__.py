"""For people who watch a run in a browser: the files of its page, and the routes that serve them.

In: requests. Out: static files, which say nothing of the run.
"""

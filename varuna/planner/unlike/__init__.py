"""Pipelines that are not alike: of different speed, of two depths so that no worker is left over, of device classes.

In: plans of equal pipelines, which the search found, and the request. Out: a plan whose pipelines get as many
micro-batches as they can run in the same time.
"""

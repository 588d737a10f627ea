"""Stores of checkpoints: one small seam over a local directory, S3, Azure Blob, Google Cloud Storage, or memory.

In: names and bytes. Out: each operation done for good or not done at all; outages of minutes delay, they lose nothing.
"""

"""Where checkpoints lie: one small seam over a local directory, S3, Azure Blob, Google Cloud Storage, or memory.

``base`` says what a store does, ``folder`` and ``objects`` do it, ``patience`` retries, ``opening`` picks by URL.
No torch. Calls block and may come from any thread; none may come from a forked child.
"""

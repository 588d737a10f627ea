"""Checkpoints: a file per section, and a manifest, written last, that completes it (paper §"Continuous Checkpointing").

In: reports of durable shards. Out: complete checkpoints, one run at a time in a directory, old ones removed. Bytes of
tensors are ``checkpoint.io``'s.
"""

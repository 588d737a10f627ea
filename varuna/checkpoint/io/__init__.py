"""A section's state as bytes: copied at a step boundary, written in the background, read by ranges, exported.

In: tensors of sections. Out: safetensors files that any plan can read, and the tensors again. Nothing is ever
unpickled.
"""

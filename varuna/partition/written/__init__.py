"""A captured model as bytes and back, so that one worker captures it and others take it over.

In: a ``PartitionedModel``. Out: bytes that hold data only, and the same model on another machine.
"""

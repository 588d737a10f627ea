"""From an unmodified model to sections: capture, costs, cut-points, one graph module per section.

In: ``Recipe``, what the user gives. Out: ``model.PartitionedModel``. The packages inside are its parts, from the bottom
up: ``watching``, ``opaque``, ``graph``, ``capture``, ``cut``, ``loss``; ``initial`` fills the parameters.
"""

"""``squeeze()`` in a captured graph: it drops the dimensions that have one element in every batch.

Captured with several examples, forward keeps their dimension. A micro-batch of one is a part of such a batch, so its
sections must keep it, too: the graph names the dimensions that go.
"""

import torch
from torch.fx import Graph

aten = torch.ops.aten


def name_squeezed(graph: Graph) -> None:
    """Let every squeeze of ``graph`` drop dimensions of one element only where it did in capture."""
    for target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        for node in graph.find_nodes(op="call_function", target=target):
            source = node.args[0].meta["val"]
            asked = node.args[1] if len(node.args) > 1 else range(source.dim())
            dims = [asked] if isinstance(asked, int) else list(asked)
            single = [dim for dim in dims if isinstance(source.shape[dim], int) and source.shape[dim] == 1]
            node.target, node.args = aten.squeeze.dims, (node.args[0], single)

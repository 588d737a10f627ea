"""A Ray cluster of several nodes on this machine, as a process that ends with its standard input.

A line of input is an order, a line of output its answer: ``add CPUS`` prints the new node's identifier, ``kill NODE``
ends a node at once.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = {}
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            order, argument = line.split()
            if order == "add":
                node = cluster.add_node(wait=False, num_cpus=int(argument))
                cluster.wait_for_nodes(timeout=120)
                nodes[node.node_id] = node
                print(node.node_id, flush=True)
            elif order == "kill":
                cluster.remove_node(nodes.pop(argument), allow_graceful=False)
                print("killed", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()

"""A Ray cluster of two nodes on this machine, until its standard input ends: prints the address of its head."""

import sys

from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=node)
cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()

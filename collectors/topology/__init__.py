"""The node's and the cluster's links as one graph, and the plan that is laid on it."""

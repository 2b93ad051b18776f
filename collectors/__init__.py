"""Everything that turns a running job, a node or a file into typed tables."""

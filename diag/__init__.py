"""The command line, and supervision of a running job."""

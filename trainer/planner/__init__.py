"""Before launch: what a layout needs, sends and takes. Arithmetic only, no torch."""

"""Metrics (tables to numbers), rules (numbers to findings), the verdict and its report."""

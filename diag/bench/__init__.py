"""Measurements of ourselves: each NAME is a module with `measure(rounds) -> list[Row]`."""

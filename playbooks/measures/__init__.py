"""What printed numbers are: rows of `measurements` as values with a quantity, a name and a run.

In: Collected. Out: values by rank (by_rank), by run (runs), and the sizes of the layout. Labels
only select what a number is; rules decide by the numbers.
"""

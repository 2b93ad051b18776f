"""Numbers, digests and id lists that programs print in words of their own, as labelled values.

In: bare lines of any log, note, table, CSV or JSON-lines file. Out: rows of `measurements`. What a
label means is decided by playbooks; here nothing is judged and no number is changed.
"""

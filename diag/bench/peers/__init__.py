"""The same training in plain torch, to hold the trainer against: a script for each of its pieces.

Each module has `Peer(config)`: the trainer's model classes, data, optimizer and loss without any of
its wrappers, on two ranks of the default group. `duel.py` runs a peer and the trainer in turns.
"""

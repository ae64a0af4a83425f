"""The contract that both sides of kvferry share: messages, keys, layouts, handles, logs.

Nothing here imports ``kvsched`` or ``kvworker``; torch is imported only by the functions that
need it, so that log tools run without it.
"""

__version__ = "0.1.0"

"""``run``: a recording played to real daemons, with synthetic KV memory.

The rest of ``kvreplay`` only reads. What talks to daemons is here, and imported only by ``run``:
``content`` and ``memory`` (bytes that can be checked), ``link`` (a conversation), ``daemon`` (the
process), ``rank`` (both sides of one rank of an engine), ``plan`` (what a recording asks for),
``outcomes`` (what became of it), ``driver`` (all of it in order).
"""

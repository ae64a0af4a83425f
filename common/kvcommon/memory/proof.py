"""What scratch memory holds to prove that two processes see the same device memory."""

import hashlib

#: Bytes of the scratch memory.
PROOF_BYTES = 4096


def question(nonce: int) -> bytes:
    """What the owner writes."""
    return _pattern(b"question", nonce)


def answer(nonce: int) -> bytes:
    """What the daemon writes once it has read the question."""
    return _pattern(b"answer", nonce)


def _pattern(purpose: bytes, nonce: int) -> bytes:
    seed = purpose + nonce.to_bytes(8, "little")
    return hashlib.shake_128(seed).digest(PROOF_BYTES)

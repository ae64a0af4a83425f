"""Identity: which bytes a stored object holds, and its name.

A key is a namespace fingerprint, a group and vLLM's block hash. Everything that must be equal for
the bytes to be usable is in the namespace; a mismatch is therefore a miss, never a wrong hit.
"""

import hashlib

import msgspec

from kvcommon.ids import BlockHash, Fingerprint, StoreKey

#: First part of every key; a new format of keys or objects gets a new one.
KEY_PREFIX = "kvf1"
#: Bytes of the fingerprint digest.
_DIGEST_BYTES = 12


class Namespace(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that must be equal for stored KV bytes to be usable, of one rank of one engine."""

    model: str
    revision: str
    #: Model (activation) dtype, for example ``torch.bfloat16``.
    dtype: str
    #: KV cache dtype as configured, for example ``auto`` or ``fp8_e5m2``.
    cache_dtype: str
    #: Tokens per block, by group.
    block_sizes: tuple[int, ...]
    #: Digest of the byte layout of each group (``layout_digest``).
    layout: tuple[str, ...]
    #: First layer and number of layers that this rank holds.
    layers: tuple[int, int]
    tensor_parallel: int
    pipeline_parallel: int
    #: (pp rank, tp rank).
    rank: tuple[int, int]
    hash_algorithm: str
    #: What seeds vLLM's first hash, ``PYTHONHASHSEED`` or vLLM's own constant.
    hash_seed: str
    #: Extra word chosen by the operator, to separate tenants or weights of the same name.
    label: str = ""
    #: Format flags that change what the bytes mean (``nz`` on Ascend, quantisation, …).
    flags: tuple[str, ...] = ()


def fingerprint(namespace: Namespace) -> Fingerprint:
    """Digest a namespace: 24 hexadecimal digits."""
    text = msgspec.json.encode(msgspec.to_builtins(namespace), order="sorted")
    return Fingerprint(hashlib.sha256(text).hexdigest()[: 2 * _DIGEST_BYTES])


def store_key(mark: Fingerprint, group: int, block_hash: BlockHash) -> StoreKey:
    """Name the object that holds one block of one group in one namespace."""
    return StoreKey(f"{KEY_PREFIX}-{mark}-{group}-{block_hash.hex()}")


def namespace_prefix(mark: Fingerprint) -> str:
    """Return what all keys of a namespace begin with."""
    return f"{KEY_PREFIX}-{mark}-"


def differences(ours: Namespace, theirs: Namespace) -> tuple[str, ...]:
    """Say field by field how two namespaces differ, one line each: ``field: ours, not theirs``."""
    lines = []
    for name in ours.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            lines.append(f"{name}: {mine!r}, not {other!r}")
    return tuple(lines)

import re
from typing import Any

import msgspec
import pytest

from kvcommon.ids import BlockHash, Fingerprint
from kvcommon.keys import Namespace, differences, fingerprint, namespace_prefix, store_key

BASE = Namespace(
    model="tiny",
    revision="main",
    dtype="torch.bfloat16",
    cache_dtype="auto",
    block_sizes=(128,),
    layout=("abc",),
    layers=(0, 4),
    tensor_parallel=1,
    pipeline_parallel=1,
    rank=(0, 0),
    hash_algorithm="sha256",
    hash_seed="0",
)
#: One other value for every field.
CHANGES: dict[str, Any] = {
    "model": "tinier",
    "revision": "dev",
    "dtype": "torch.float16",
    "cache_dtype": "fp8_e5m2",
    "block_sizes": (64,),
    "layout": ("xyz",),
    "layers": (4, 4),
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "rank": (0, 1),
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "1",
    "label": "tenant",
    "flags": ("nz",),
}


def changed(field: str) -> Namespace:
    return msgspec.structs.replace(BASE, **{field: CHANGES[field]})


def test_every_field_has_a_change_here() -> None:
    assert set(CHANGES) == set(Namespace.__struct_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_counts(field: str) -> None:
    assert fingerprint(changed(field)) != fingerprint(BASE)


def test_fingerprint_is_stable() -> None:
    # A change of this value makes every object stored so far unreachable: change KEY_PREFIX too.
    assert fingerprint(BASE) == "b61d4d82fa8c0643f0d746f8"


def test_keys_of_a_namespace_begin_with_its_prefix() -> None:
    mark = fingerprint(BASE)
    key = store_key(mark, 1, BlockHash(b"\x01\xff"))
    assert key == f"kvf1-{mark}-1-01ff"
    assert key.startswith(namespace_prefix(mark))
    assert not key.startswith(namespace_prefix(Fingerprint(mark[:-1])))


def test_keys_are_plain_text() -> None:
    key = store_key(fingerprint(BASE), 12, BlockHash(bytes(range(32))))
    assert re.fullmatch(r"kvf1-[0-9a-f]{24}-12-[0-9a-f]{64}", key)


def test_keys_differ_by_group_and_hash() -> None:
    mark = fingerprint(BASE)
    keys = {store_key(mark, group, BlockHash(bytes([b]))) for group in (1, 11) for b in (1, 16)}
    assert len(keys) == 4


def test_differences_name_field_and_both_values() -> None:
    assert differences(BASE, BASE) == ()
    assert differences(changed("model"), BASE) == ("model: 'tinier', not 'tiny'",)
    theirs = msgspec.structs.replace(changed("layout"), label="tenant")
    assert differences(BASE, theirs) == (
        "layout: ('abc',), not ('xyz',)",
        "label: '', not 'tenant'",
    )

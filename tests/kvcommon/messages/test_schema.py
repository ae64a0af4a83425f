"""The wire schema, held against a snapshot: what has been released is never renamed or retyped.

After adding a message or a field (with a default), take it into the snapshot:

    .venv/bin/python tests/kvcommon/messages/test_schema.py
"""

import json
import sys
import typing
from pathlib import Path

import msgspec
import msgspec.inspect as mi

from kvcommon.messages import Envelope, FromDaemon, ToDaemon

SNAPSHOT = Path(__file__).with_name("schema.json")

Schema = dict[str, dict[str, str]]
#: How each leaf type reads in the snapshot.
LEAVES: dict[type[mi.Type], str] = {
    mi.BoolType: "bool",
    mi.BytesType: "bytes",
    mi.FloatType: "float",
    mi.IntType: "int",
    mi.NoneType: "none",
    mi.RawType: "raw",
    mi.StrType: "str",
}


def spell(kind: mi.Type, found: Schema) -> str:
    """Spell a type; add the Structs and enums it is made of to ``found``."""
    if isinstance(kind, mi.StructType):
        add_struct(kind, found)
        text = kind.cls.__name__
    elif isinstance(kind, mi.EnumType):
        text = kind.cls.__name__
        found[text] = {str(member.value): "value" for member in kind.cls}
    elif isinstance(kind, mi.VarTupleType):
        text = f"[{spell(kind.item_type, found)}, ...]"
    elif isinstance(kind, mi.TupleType):
        text = f"[{', '.join(spell(item, found) for item in kind.item_types)}]"
    elif isinstance(kind, mi.DictType):
        text = f"{{{spell(kind.key_type, found)}: {spell(kind.value_type, found)}}}"
    elif isinstance(kind, mi.UnionType):
        text = " | ".join(sorted(spell(item, found) for item in kind.types))
    else:
        text = LEAVES[type(kind)]
    return text


def add_struct(kind: mi.StructType, found: Schema) -> None:
    """Add a Struct: for each field its wire name, type, and whether it must be there."""
    name = kind.cls.__name__
    if name in found:
        return
    found[name] = fields = {}
    if kind.tag is not None:
        fields[f"({kind.tag_field})"] = repr(kind.tag)
    for field in kind.fields:
        need = "required" if field.required else "optional"
        fields[field.encode_name] = f"{need} {spell(field.type, found)}"


def schema() -> Schema:
    """Describe everything that crosses the wire."""
    found: Schema = {}
    for kind in (Envelope, *typing.get_args(ToDaemon), *typing.get_args(FromDaemon)):
        spell(mi.type_info(kind), found)
    return found


def broken(old: Schema, new: Schema) -> list[str]:
    """Name what a peer that knows ``old`` would no longer understand, or would miss."""
    lines = []
    for kind, fields in old.items():
        for field, spelt in fields.items():
            now = new.get(kind, {}).get(field)
            if now != spelt:
                lines.append(f"{kind}.{field}: was {spelt}, is {now or 'gone'}")
        lines += [
            f"{kind}.{field}: new, but without default"
            for field, spelt in new.get(kind, {}).items()
            if field not in fields and spelt.startswith("required")
        ]
    lines += [f"{kind}: gone" for kind in old if kind not in new]
    return lines


def read_snapshot() -> Schema:
    return msgspec.json.decode(SNAPSHOT.read_bytes(), type=Schema)


def test_nothing_was_renamed_retyped_or_removed() -> None:
    assert broken(read_snapshot(), schema()) == []


def test_snapshot_is_complete() -> None:
    assert read_snapshot() == schema(), f"run {sys.executable} {__file__}"


def test_a_change_is_seen() -> None:
    old = schema()
    new = {name: dict(fields) for name, fields in old.items()}
    new["PlanAck"]["colour"] = "optional str"
    assert broken(old, new) == []
    new["StepVerdict"]["colour"] = "required str"
    new["LayersComputed"]["layers"] = new["LayersComputed"].pop("num_layers")
    new["Lookup"]["lookup_id"] = "required str"
    new["JobOutcome"].pop("done")
    new.pop("Detach")
    text = "\n".join(broken(old, new))
    assert "StepVerdict.colour: new, but without default" in text
    assert "LayersComputed.num_layers: was required int, is gone" in text
    assert "LayersComputed.layers: new, but without default" in text
    assert "Lookup.lookup_id: was required int, is required str" in text
    assert "JobOutcome.done: was value, is gone" in text
    assert "Detach: gone" in text


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")

#!/usr/bin/env python3
"""Check the manifest examples/kubernetes/mpijob.yaml with the schema of the MPI Operator's MPIJob; needs PyYAML.

    python ci/containers/check.py                    # with the part of the schema that is in the repository
    python ci/containers/check.py --crd FILE         # with the whole, manifests/base/kubeflow.org_mpijobs.yaml
    python ci/containers/check.py --crd FILE --trim  # and write that part again

The part, mpijob.schema.json, has the fields that the manifest uses; all that the schema requires stays in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "mpijob.yaml"
SCHEMA = Path(__file__).with_name("mpijob.schema.json")

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}
"""The types of OpenAPI, and those that YAML has for them."""

KEPT = ("type", "properties", "items", "additionalProperties", "required", "enum", "x-kubernetes-int-or-string")
"""The parts of a schema that are compared; what else is in the operator's describes fields or gives defaults."""


def find_faults(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield what in `value` the schema does not allow. Unknown fields are faults, as for kubectl."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is no integer or string"
        return
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from find_faults(one, schema["items"], f"{path}[{index}]")
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name} is missing"
        for name, one in value.items():
            inner = find_field(schema, name)
            if inner is None:
                yield f"{path}.{name} is no field"
            else:
                yield from find_faults(one, inner, f"{path}.{name}")


def find_field(schema: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the schema of a field; a schema of anything for those of an object without listed fields."""
    properties: dict[str, Any] = schema.get("properties", {})
    if name in properties:
        return dict(properties[name])
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        return others
    return None if properties else {}


def trim(schema: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the part of the schema that `value` uses."""
    kept = {name: schema[name] for name in KEPT if name in schema}
    if isinstance(value, list) and "items" in kept:
        kept["items"] = join([trim(schema["items"], one) for one in value])
    if "properties" in kept:
        used = value if isinstance(value, dict) else {}
        kept["properties"] = {
            name: trim(one, used[name]) for name, one in sorted(schema["properties"].items()) if name in used
        }
    if isinstance(kept.get("additionalProperties"), dict) and isinstance(value, dict):
        kept["additionalProperties"] = join([trim(schema["additionalProperties"], one) for one in value.values()])
    return kept


def join(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema with the fields of all of `schemas`, which are parts of one."""
    whole: dict[str, Any] = {}
    for one in schemas:
        for name, part in one.items():
            both = name in whole and isinstance(part, dict)
            if both and name == "properties":
                names = sorted({*whole[name], *part})
                part = {key: join([found[key] for found in (whole[name], part) if key in found]) for key in names}
            elif both:
                part = join([whole[name], part])
            whole[name] = part
    return whole


def read_crd(file: Path) -> dict[str, Any]:
    """Return the schema in the operator's definition of the resource."""
    definition = yaml.safe_load(file.read_text())
    version = next(one for one in definition["spec"]["versions"] if one["name"] == "v2beta1")
    return dict(version["schema"]["openAPIV3Schema"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crd", type=Path, help="the definition of the resource, in a checkout of the MPI Operator")
    parser.add_argument("--trim", action="store_true", help="write the part of the schema that the manifest uses")
    arguments = parser.parse_args()
    manifest = yaml.safe_load(MANIFEST.read_text())
    schema = read_crd(arguments.crd) if arguments.crd else json.loads(SCHEMA.read_text())
    if arguments.trim:
        SCHEMA.write_text(json.dumps(trim(schema, manifest), indent=1, sort_keys=True) + "\n")
    faults = list(find_faults(manifest, schema, "MPIJob"))
    print("\n".join(faults) or f"{MANIFEST.name} agrees with the schema")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()

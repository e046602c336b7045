"""Check manifests offline: against the models of the official Kubernetes client, and RayJobs against KubeRay's definition."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml

RAY_JOB_SPEC = yaml.safe_load((Path(__file__).parents[1] / "cluster" / "data" / "rayjob_schema.yaml").read_text())
PRIMITIVES = {"str": str, "int": int, "bool": bool, "float": (int, float), "datetime": str, "object": object}


def check_manifest(document: dict[str, Any]) -> None:
    """Raise ValueError with the path of the first field that the API does not have, or that has another type."""
    if document["apiVersion"] == "ray.io/v1":
        check_ray(document)
        return
    version = document["apiVersion"].rpartition("/")[2].capitalize()
    check_value(document, f"{version}{document['kind']}", document["kind"])


def check_ray(document: dict[str, Any]) -> None:
    """Check a RayJob or a RayCluster: its own fields against KubeRay's definition, its pods against the core API."""
    check_value(document["metadata"], "V1ObjectMeta", f"{document['kind']}.metadata")
    cluster = RAY_JOB_SPEC["properties"]["rayClusterSpec"]
    schema = {"RayJob": RAY_JOB_SPEC, "RayCluster": cluster}[document["kind"]]
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document["spec"]):
        raise ValueError(f"{document['kind']}.{error.json_path}: {error.message}")
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        check_value(group["template"], "V1PodTemplateSpec", group.get("groupName", "headGroup"))


def check_value(value: Any, kind: str, path: str) -> Any:
    """Check a value against a type of the client, such as `V1Pod`, `list[V1Container]` or `dict[str, str]`.

    Returns the value as the client's models, which check required fields and allowed values when they are made.
    """
    if items := re.fullmatch(r"list\[(.+)\]", kind):
        require(value, list, path)
        return [check_value(item, items[1], f"{path}[{number}]") for number, item in enumerate(value)]
    if values := re.fullmatch(r"dict[\[(]str, (.+)[\])]", kind):
        require(value, dict, path)
        return {key: check_value(item, values[1], f"{path}.{key}") for key, item in value.items()}
    if kind in PRIMITIVES:
        require(value, PRIMITIVES[kind], path)
        return value
    from kubernetes import client

    model = getattr(client, kind)
    require(value, dict, path)
    fields = {name: attribute for attribute, name in model.attribute_map.items()}
    if unknown := value.keys() - fields.keys():
        raise ValueError(f"{path}: {kind} has no field {', '.join(sorted(unknown))}")
    content = {
        fields[name]: check_value(item, model.openapi_types[fields[name]], f"{path}.{name}")
        for name, item in value.items()
    }
    try:
        return model(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def require(value: Any, kind: Any, path: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"{path}: {value!r} has the wrong type")

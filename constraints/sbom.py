"""Print the software bill of materials of this environment, in CycloneDX 1.5 (JSON): `make sbom`.

    python constraints/sbom.py [LOCK ...]

It lists every installed distribution with its version, licence and package URL. Versions that a lock file has get the SHA-256 hashes
of their files. It needs no network.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

SUBJECT = "rstar-lab"


def normalised(name: str) -> str:
    """Return the name of a distribution as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_of(lock: str) -> dict[tuple[str, str], list[str]]:
    """Return (name, version) -> SHA-256 hashes of the text of a lock file."""
    found: dict[tuple[str, str], list[str]] = {}
    key = ("", "")
    for line in lock.splitlines():
        if pin := re.match(r"([\w.-]+)==([^\s;\\]+)", line):
            key = normalised(pin[1]), pin[2]
        found.setdefault(key, []).extend(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
    return found


def component(distribution: Distribution, hashes: dict[tuple[str, str], list[str]]) -> dict[str, Any]:
    """Return the entry of one distribution."""
    name, version = normalised(distribution.metadata["Name"]), distribution.version
    purl = f"pkg:pypi/{name}@{version}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licence := distribution.metadata.get("License-Expression"):
        entry["licenses"] = [{"expression": licence}]
    elif (text := distribution.metadata.get("License")) and len(text) < 100:
        entry["licenses"] = [{"license": {"name": text.strip()}}]
    if known := hashes.get((name, version)):
        entry["hashes"] = [{"alg": "SHA-256", "content": content} for content in sorted(known)]
    return entry


def bill(locks: list[Path]) -> dict[str, Any]:
    """Return the bill of materials of this environment."""
    hashes: dict[tuple[str, str], list[str]] = {}
    for lock in locks:
        hashes |= hashes_of(lock.read_text())
    entries = {entry["name"]: entry for entry in (component(found, hashes) for found in distributions())}
    subject = entries.pop(SUBJECT, None)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": subject | {"type": "application"}} if subject else {},
        "components": [entries[name] for name in sorted(entries)],
    }


if __name__ == "__main__":
    print(json.dumps(bill([Path(name) for name in sys.argv[1:]]), indent=1))

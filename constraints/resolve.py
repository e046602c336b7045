"""Resolve the locked versions of the three backends: cpu, cuda, rocm. Nothing is installed.

    python constraints/resolve.py check [BACKEND ...] [--python 3.11,3.12]     fails on a conflict
    python constraints/resolve.py update [BACKEND ...]                         write newer versions into BACKEND.txt
    python constraints/resolve.py lock [BACKEND ...]                           write their hashes into BACKEND.lock

`check` resolves pyproject.toml with the versions of BACKEND.txt as constraints, for Linux on x86_64, and fails if the registry has
no consistent set, or if BACKEND.lock lacks the hashes of a version. It needs `uv` and access to the package registry.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-unknown-linux-gnu"


@dataclass(frozen=True)
class Backend:
    """The extras that a backend installs, and the files that change how they resolve.

    use_project_overrides: apply `tool.uv.override-dependencies` of pyproject.toml; only the CPU build needs them.
    """

    extras: tuple[str, ...]
    use_project_overrides: bool = False
    overrides: str | None = None
    also_constrained_by: str | None = None


COMMON = ("sandbox", "notebooks", "verl", "inspect", "hub", "dev")
BACKENDS = {
    "cpu": Backend(("cpu", *COMMON), use_project_overrides=True),
    "cuda": Backend(("cuda", *COMMON)),
    # torch, triton and vLLM come from the image, which has the vLLM of the CUDA set: its other requirements must hold here too.
    "rocm": Backend(("rocm", *COMMON), overrides="rocm-image.txt", also_constrained_by="cuda.txt"),
}
HEADERS = {
    "cuda": "torch, triton and vLLM are the versions that verl 0.9.1's extra `vllm` pins.",
    "rocm": "torch, triton and vLLM are missing: they come from the image (cluster/rocm/Dockerfile).",
}


def uv() -> str:
    """Return the `uv` of this interpreter's environment, else that of PATH."""
    local = Path(sys.executable).parent / "uv"
    return str(local) if local.exists() else "uv"


def compile_command(name: str, python: str, *, locked: bool) -> list[str]:
    """Return the `uv pip compile` command of one backend. locked: with its lock file as constraints."""
    backend = BACKENDS[name]
    command = [uv(), "pip", "compile", "pyproject.toml", "--quiet", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links"]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    command += [part for extra in backend.extras for part in ("--extra", extra)]
    if not backend.use_project_overrides:
        command.append("--no-config")
    if backend.overrides:
        command += ["--override", str(FOLDER / backend.overrides)]
    if backend.also_constrained_by:
        command += ["--constraint", str(FOLDER / backend.also_constrained_by)]
    command += ["--constraint", str(FOLDER / f"{name}.txt")] if locked else ["--upgrade"]
    return command


def resolve(name: str, python: str, *, locked: bool = True) -> str:
    """Return the resolved requirements of a backend. Raises RuntimeError with uv's explanation of a conflict."""
    done = subprocess.run(
        compile_command(name, python, locked=locked), cwd=FOLDER.parent, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{name}, Python {python}: {done.stderr.strip()}")
    return done.stdout


def check(names: list[str], pythons: list[str]) -> int:
    """Resolve each backend for each Python; print one line each. Returns the number of conflicts."""
    conflicts = 0
    for name in names:
        if missing := missing_hashes(name):
            conflicts += 1
            print(f"{name}.lock has no hashes of {', '.join(missing)}; run `make constraints`", file=sys.stderr)
        for python in pythons:
            try:
                count = len(resolve(name, python).splitlines())
                print(f"{name}, Python {python}: {count} packages", flush=True)
            except RuntimeError as error:
                conflicts += 1
                print(f"conflict: {error}", file=sys.stderr, flush=True)
    return conflicts


# Not in the lock of the CPU set: `make setup` takes these from PyTorch's index of CPU builds, or from a local folder.
CPU_BUILDS = ("torch", "torchaudio", "torchvision", "torchcodec")


def pins(name: str) -> list[str]:
    """Return the lines of a backend's BACKEND.txt whose hashes are locked."""
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    left_out = CPU_BUILDS if name == "cpu" else ()
    return [line for line in lines if line and not line.startswith("#") and line.split("==")[0] not in left_out]


def missing_hashes(name: str) -> list[str]:
    """Return the pins of a backend without hashes in its lock file."""
    text = (FOLDER / f"{name}.lock").read_text()
    locked = set(re.findall(r"^([\w.-]+==[^\s;]+).*\\\n\s+--hash=", text, re.MULTILINE))
    return [pin for pin in pins(name) if pin.split(" ;")[0].split(";")[0].strip() not in locked]


def lock(names: list[str]) -> None:
    """Write the hashes of all files of the pinned versions into the lock files. Raises RuntimeError with uv's explanation."""
    for name in names:
        command = [
            uv(),
            "pip",
            "compile",
            "-",
            "--no-config",
            "--no-deps",
            "--universal",
            "--generate-hashes",
            "--quiet",
        ]
        command += ["--python-version", PYTHONS[0], "--no-header", "--no-annotate"]
        command += ["--no-emit-index-url", "--no-emit-find-links"]
        done = subprocess.run(command, input="\n".join(pins(name)), cwd=FOLDER, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr.strip()}")
        header = f"# Hashes of the versions in {name}.txt; written by `make constraints`.\n"
        (FOLDER / f"{name}.lock").write_text(header + done.stdout)


def merge(old: str, new: str) -> str:
    """Merge the sets of Python 3.11 and 3.12; a package whose version differs gets one line for each."""
    sets = [dict(line.split("==") for line in text.splitlines()) for text in (old, new)]
    lines = []
    for package in sorted(sets[0].keys() | sets[1].keys()):
        versions = [found.get(package) for found in sets]
        if versions[0] == versions[1]:
            lines.append(f"{package}=={versions[0]}")
            continue
        markers = ("python_version < '3.12'", "python_version >= '3.12'")
        lines += [f"{package}=={v} ; {marker}" for v, marker in zip(versions, markers, strict=True) if v]
    return "".join(f"{line}\n" for line in lines)


def update(names: list[str]) -> None:
    """Write new lock files of the GPU backends. `make constraints` writes cpu.txt itself."""
    for name in names:
        old, new = (resolve(name, python, locked=False) for python in PYTHONS)
        header = f"# Written by `make constraints`. {HEADERS[name]}\n"
        (FOLDER / f"{name}.txt").write_text(header + merge(old, new))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["check", "update", "lock"])
    parser.add_argument("backends", nargs="*", help="cpu, cuda, rocm; default: all")
    parser.add_argument("--python", default=",".join(PYTHONS))
    arguments = parser.parse_args()
    if unknown := set(arguments.backends) - set(BACKENDS):
        parser.error(f"unknown backend {', '.join(sorted(unknown))}; choose from {', '.join(BACKENDS)}")
    if arguments.action == "update":
        update(arguments.backends or list(HEADERS))
    elif arguments.action == "lock":
        lock(arguments.backends or [*BACKENDS, "build"])
    elif check(arguments.backends or list(BACKENDS), arguments.python.split(",")):
        sys.exit(1)

"""Identity of an evaluation: everything that can change its numbers. Evaluations with different identities are different runs."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rstar_lab import __version__, verify
from rstar_lab.rl.plugins import NAME, source_hash
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import CODE_TOOLS, EnvironmentEntry, Recipe
from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results, renderer_type
from rstar_lab.runs.files import write_json
from rstar_lab.untrusted.files import DataError, read_json
from rstar_lab.verify.released import released_program

_MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.jinja", "*.model")


def evaluation_identity(recipe: Recipe, problems: Sequence[Problem], model: str, samples: int) -> dict[str, Any]:
    """Return the identity of an evaluation: name of a setting -> its value or hash, so that errors can name what differs.

    model: `model_hash` of a folder; for servers, the name of the model and that hash. samples: rollouts per problem.
    """
    rl, limits, evaluate, sandbox = recipe.rl, recipe.rl.limits, recipe.evaluate, recipe.sandbox
    code_tools = [name for name in rl.tools if name in CODE_TOOLS]
    prompt = ""  # with prompt_format: model, the hash of the model includes its chat template
    if renderer_type(rl.prompt.format).has_template:
        prompt = render_prompt("{question}", code_tools, rl.prompt.format) + render_tool_results(
            ["{}"], rl.prompt.format
        )
    style = {key: value for key, value in rl.prompt if key != "format" and value not in (None, {})}
    if template := style.get("chat_template"):
        style["chat_template"] = _named(template)
    return {
        "model": model,
        "problems": _hash([problem.as_row() for problem in problems]),
        "prompt": _hash([rl.prompt.format, prompt, *([style] if style else [])]),
        "tools": [_named(name) for name in rl.tools],
        "tool_limits": [
            limits.max_tool_chars, limits.max_calls_per_turn, limits.tool_truncate_side, limits.tool_timeout_s,
        ],
        "reward": [_named(rl.reward), rl.answer, *_grader_version(rl.reward)],
        "sandbox": [
            sandbox.url, sandbox.timeout_s, sandbox.memory_mb, *([sandbox.fault_share] if sandbox.fault_share else []),
            *([sandbox.isolation] if sandbox.isolation != "namespaces" else []),
        ],
        "sampling": [
            samples, evaluate.temperature, evaluate.top_p, evaluate.max_turns, evaluate.max_response_tokens, recipe.seed,
            rl.rollout_mode,
        ],
        "engine": [recipe.engine.kind, recipe.engine.dtype],
        "verifier": verifier_version(),
    } | ({"environments": [_environment(entry) for entry in rl.environments]} if rl.environments else {})  # fmt: skip


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the 8 hexadecimal digits that identify an evaluation in its run id."""
    return _hash(identity)[:8]


def differing_parts(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the parts that differ, as text for an error; empty if none does."""
    parts = (f"{key}: {old.get(key)} then, {new[key]} now" for key in new if old.get(key) != new[key])
    return "; ".join(parts)


def model_hash(folder: Path, cache_dir: Path) -> str:
    """Return a hash of the weights, configuration and tokenizer in a model folder.

    Hashes of files are cached in `cache_dir` by path, size and modification time: 28 GB take about a minute.
    """
    cache_file, known = cache_dir / "file-hashes.json", dict[str, str]()
    with contextlib.suppress(DataError):  # there is none, or it is damaged
        known = read_json(cache_file, dict[str, str])
    files = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})
    hashes, new = {}, {}
    for path in files:
        stat = path.stat()
        key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                new[key] = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        hashes[path.name] = known.get(key) or new[key]
    if new:
        with contextlib.suppress(PermissionError):  # in a shared runs folder, the cache can belong to another user
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_json(cache_file, known | new)
    return _hash(hashes)


@cache
def verifier_version() -> str:
    """Return the version of the package that computes answers, and a hash of the code of `rstar_lab.verify`."""
    source = b"".join(path.read_bytes() for path in sorted(Path(str(verify.__file__)).parent.glob("*.[pt]*")))
    own = f"rstar-lab {__version__} {hashlib.blake2b(source, digest_size=4).hexdigest()}"
    return f"{own}, {_version('mpmath')}"


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} -"


def _grader_version(reward: str | None) -> list[str]:
    return [_version("verl"), _hash(released_program())] if reward == "released" else []  # its grader is that of verl


def _environment(entry: EnvironmentEntry) -> list[Any]:
    """Return the settings of an environment that can change its numbers, and hashes of its source files."""
    named = [_named(name) for name in (entry.environment, entry.reward, *entry.tools) if name]
    return [entry.name, *named, *_grader_version(entry.reward), entry.limits.model_dump()]


def _named(name: str) -> str:
    """Return the name of a tool or reward; for a user's `module:name`, also a hash of its source file."""
    return f"{name}@{source_hash(name, 'rl')}" if NAME.fullmatch(name) else name


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()

"""Files, answers and texts of others are read by rstar_lab/untrusted only. Every other call of a reader has a reason."""

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rstar_lab"
READERS = {
    "json.loads", "json.load", "pq.read_table", "pq.read_metadata", "pq.read_schema", "pq.ParquetFile", "yaml.load",
    "yaml.safe_load",
}  # fmt: skip
METHODS = {"read_text", "read_bytes"}

OWN_FILE = "a file of this package, or one that only this machine's user can have written"
OWN_VALUE = "JSON that this process has made"
CHANNEL = "a message of a process that this one has started"
USER = "a file or an argument that the user names: profile, recipe, token, module"
SERVICE = "an answer of a service that the user names; its errors are converted beside it"
BOUNDED = "bytes whose size is bounded before; errors are converted beside it"
MODEL = "text of the model, whose errors are part of the result"
# File: calls, reason. The list only gets shorter.
EXCEPTIONS = {
    "analysis/figure_image.py": (2, CHANNEL),
    "analysis/inspector/export.py": (2, OWN_FILE),
    "analysis/inspector/link.py": (1, OWN_VALUE),
    "analysis/inspector/palette.py": (3, OWN_FILE),
    "analysis/paper.py": (2, OWN_FILE),
    "analysis/report.py": (1, OWN_VALUE),
    "cli/mcp.py": (1, OWN_FILE),
    "cli/shared.py": (1, USER),
    "cli/sandbox.py": (1, USER),
    "common/resources.py": (1, OWN_FILE),
    "common/service_tokens.py": (2, USER),
    "doctor/diagnosis.py": (2, OWN_FILE),
    "exchange/mcp_server.py": (2, OWN_FILE),
    "exchange/tool_process.py": (2, CHANNEL),
    "exchange/training_files.py": (2, OWN_VALUE),
    "hardware/local_ray.py": (1, CHANNEL),
    "hardware/profiles.py": (1, USER),
    "jobs/board.py": (1, OWN_FILE),
    "jobs/kuberay.py": (1, SERVICE),
    "jobs/preflight.py": (1, CHANNEL),
    "jobs/prepare.py": (2, USER),
    "jobs/ray_jobs.py": (1, USER),
    "jobs/render.py": (3, OWN_FILE),
    "jobs/sandbox_service.py": (1, CHANNEL),
    "jobs/ssh/agent.py": (1, CHANNEL),
    "jobs/ssh/backend.py": (1, USER),
    "jobs/ssh/mirror.py": (2, OWN_VALUE),
    "rl/data/converters.py": (4, BOUNDED),
    "rl/data/sources.py": (2, BOUNDED),
    "rl/engines/vllm_worker.py": (1, CHANNEL),
    "rl/identity.py": (1, OWN_FILE),
    "rl/overrides.py": (2, USER),
    "rl/plugins.py": (1, USER),
    "rl/preflight/machine.py": (1, OWN_FILE),
    "rl/recipe/explain.py": (2, OWN_FILE),
    "rl/renderers/released.py": (1, BOUNDED),
    "rl/reward/boxed.py": (1, USER),
    "rl/reward/hidden_tests.py": (1, BOUNDED),
    "rl/synthetic/traces.py": (3, OWN_FILE),
    "rl/synthetic/word_problems.py": (2, OWN_FILE),
    "rl/verl/plugin.py": (2, CHANNEL),
    "rl/verl/settings.py": (2, CHANNEL),
    "runs/provenance.py": (1, OWN_FILE),
    "sandbox/gvisor.py": (1, CHANNEL),
    "sandbox/launch.py": (1, CHANNEL),
    "sandbox/runtime/supervisor.py": (1, CHANNEL),
    "sandbox/sessions.py": (1, CHANNEL),
    "sandbox/supervisor_pool.py": (1, CHANNEL),
    "sandbox/wire.py": (1, BOUNDED),
    "tool_calls/call.py": (2, MODEL),
    "tool_calls/gemma4.py": (1, MODEL),
    "tool_calls/harmony.py": (1, MODEL),
    "verify/gold.py": (1, OWN_FILE),
    "verify/released.py": (1, OWN_FILE),
    "verify/units.py": (1, OWN_FILE),
    "viewer/service.py": (3, OWN_FILE),
}


def calls(path: Path) -> int:
    found = Counter[bool]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found[node.func.attr in METHODS or ast.unparse(node.func) in READERS] += 1
    return found[True]


def test_only_the_seam_reads_what_others_have_made() -> None:
    counts = {str(path.relative_to(PACKAGE)): calls(path) for path in sorted(PACKAGE.rglob("*.py"))}
    found = {name: count for name, count in counts.items() if count and not name.startswith("untrusted/")}
    more = {name: count for name, count in found.items() if count > EXCEPTIONS.get(name, (0, ""))[0]}
    assert more == {}, (
        "read these with rstar_lab.untrusted: read_json, parse_json, answer_json, read_text, read_parquet"
    )


def test_the_list_of_exceptions_holds_no_more_than_is_used() -> None:
    too_many = {name: calls(PACKAGE / name) for name, (most, _) in EXCEPTIONS.items() if calls(PACKAGE / name) < most}
    assert too_many == {}, "lower these"


def test_guards_against_deep_data_stand_in_the_seam_only() -> None:
    """`except RecursionError` beside untrusted/: parsers of the language of the model, and code of sandboxed processes."""
    allowed = (
        "tool_calls/", "verify/", "sandbox/", "analysis/code_use.py", "runs/errors.py", "rl/reward/hidden_tests.py",
        "rl/tools/user.py", "rl/renderers/released.py",
    )  # fmt: skip
    paths = [path for path in PACKAGE.rglob("*.py") if "RecursionError" in path.read_text(encoding="utf-8")]
    names = [str(path.relative_to(PACKAGE)) for path in paths]
    assert [name for name in names if not name.startswith((*allowed, "untrusted/"))] == []

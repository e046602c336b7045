"""The backends fulfil one protocol, and the modules of jobs import each other without circles."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Profile
from rstar_lab.jobs.job import CLASSES, backend_named, choose

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "rstar_lab" / "jobs"


def imports(path, modules):
    """Return the modules of `modules` that a file imports, also inside of functions, but not for type annotations only."""
    found, tree = set(), ast.parse(path.read_text())
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= {next((name for name in (f"{node.module}.{alias.name}", node.module) if name in modules), "")}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a class that is imported by its name
            found |= (
                {node.value.partition(":")[0]} & modules.keys() if re.fullmatch(r"[\w.]+:\w+", node.value) else set()
            )
    return found - {""}


def test_the_modules_of_jobs_import_each_other_without_circles():
    modules = {}
    for path in JOBS.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    graph = {name: imports(path, modules) - {name} for name, path in modules.items()}
    assert sum(map(len, graph.values())) > 50
    list(TopologicalSorter(graph).static_order())


def test_every_backend_of_a_profile_is_known():
    assert set(Profile.model_fields["backend"].annotation.__args__) == set(CLASSES)
    with pytest.raises(UserError, match="backend 'x' is unknown; choose local, ray, slurm, ssh or kuberay"):
        backend_named("x")


def test_the_profile_decides_unless_a_backend_or_a_host_is_given():
    assert choose("laptop")[1].name == "local" and choose(None)[1].name == "local"
    assert choose("mi300x_8x8")[1].name == "slurm" and choose("mi300x_8x8", backend="ray")[1].name == "ray"
    assert choose("mi300x_8x8", host="login")[1].elsewhere and not choose("laptop")[1].elsewhere

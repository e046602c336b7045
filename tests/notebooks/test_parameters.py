"""Parameters of the notebooks: typed and described for `papermill --help-notebook`, and lists and mappings may be text."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import jupytext
import papermill
import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.common.parameters import check_parameters

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def parameter_cell(path):
    (cell,) = [cell for cell in jupytext.read(path).cells if "parameters" in cell.metadata.get("tags", [])]
    return cell.source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_parameter_has_a_type_and_a_description(path):
    shown = papermill.inspect_notebook(str(path))
    assigned = {node.target.id for node in ast.parse(parameter_cell(path)).body if isinstance(node, ast.AnnAssign)}
    assert set(shown) == assigned and len(ast.parse(parameter_cell(path)).body) == len(assigned)
    for name, parameter in shown.items():
        assert parameter["inferred_type_name"] != "None" and len(parameter["help"]) >= 8, name
        default = ast.literal_eval(parameter["default"])
        assert parameter["inferred_type_name"].partition("[")[0] == type(default).__name__, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_after_the_parameters_checks_them(path):
    cells = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    (first,) = [later for cell, later in itertools.pairwise(cells) if "parameters" in cell.metadata.get("tags", [])]
    before, check, _ = first.source.partition("\ncheck_parameters(globals())")
    assert check and not set(papermill.inspect_notebook(str(path))) & {node.id for node in ast.walk(ast.parse(before)) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("stem", ["02_sft", "03_train", "04_evaluate", "06_ablation", "10_recipe", "11_own_tools", "12_async", "13_environment"])
def test_notebooks_that_train_or_evaluate_have_a_profile(stem):
    path = NOTEBOOKS[0].parent / f"{stem}.ipynb"
    assert papermill.inspect_notebook(str(path))["profile"]["default"] == '"laptop"'
    code = "\n".join(cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code")
    assert '"laptop"' not in code.replace(parameter_cell(path), "")


@pytest.mark.slow
def test_the_help_of_papermill_shows_the_parameters():
    command = [sys.executable, "-m", "papermill", "--help-notebook", str(NOTEBOOKS[4])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "models: list[str]" in done.stdout and "rollouts per problem" in done.stdout, done.stdout + done.stderr
    assert "Unable to parse" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_papermill_accepts_json_text(tmp_path):
    notebook = NOTEBOOKS[12]
    command = [sys.executable, "-m", "papermill", str(notebook), str(tmp_path / "out.ipynb"), "--cwd", str(tmp_path)]
    command += ["-p", "overrides", '{"rl.lr": 1e-5}', "-p", "seeds", "0,1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


PARAMETERS = """
name: str = "a"; wait: bool = True; steps: int = 4; lr: float = 0.1; keys: dict = {}; seeds: list[int] = [0]; rules: list = []
"""


def checked(**given):
    """Return the parameters of a notebook after papermill's assignments, as a cell of the notebook sees them."""
    notebook = {}
    exec(compile(PARAMETERS, "cell", "exec", dont_inherit=True), notebook)  # helpers.lazy_modules makes annotations of tests text
    notebook |= given
    check_parameters(notebook)
    return {name: notebook[name] for name in notebook["__annotations__"]}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("wait", "false", False), ("wait", "True", True), ("wait", 0, False), ("steps", "8", 8), ("steps", 1e3, 1000),
        ("lr", "1e-5", 1e-5), ("lr", 1, 1.0), ("name", 20261126, "20261126"), ("name", None, ""), ("name", Path("a/b"), "a/b"),
        ("keys", '{"sft": null, "a.b": [1, true]}', {"sft": None, "a.b": [1, True]}), ("keys", "{'a': True}", {"a": True}),
        ("seeds", "[0, 1]", [0, 1]), ("seeds", "0,1", [0, 1]), ("seeds", 3, [3]), ("rules", '["a", {"b": 1}]', ["a", {"b": 1}]),
    ],
)  # fmt: skip
def test_a_parameter_becomes_its_declared_type(name, text, value):
    found = checked(**{name: text})
    assert found[name] == value and type(found[name]) is type(value)
    assert checked(**found) == found, "the cell may run again"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("wait", "maybe", "Input should be a valid boolean, .*; got 'maybe'"), ("wait", None, "Input should be a valid boolean"),
        ("wait", 2, "Input should be a valid boolean"), ("steps", "four", "Input should be a valid integer, .*; got 'four'"),
        ("steps", 1.5, "Input should be a valid integer"), ("steps", -1, "Input should be greater than or equal to 0; got '-1'"),
        ("steps", [1], "Input should be a valid integer"), ("lr", "fast", "Input should be a valid number, .*; got 'fast'"),
        ("steps", "true", "Input should be a valid integer"), ("lr", True, "Input should be a valid number"),
        ("lr", "NaN", "Input should be a finite number"), ("lr", {}, "Input should be a valid number"),
        ("keys", None, "Input should be a valid dictionary"), ("keys", "rl.lr=1", "Input should be a valid dictionary"),
        ("seeds", None, "Input should be a valid list"), ("seeds", "0,1.5", "Input should be a valid integer"),
        ("seeds", "[1", "Input should be a valid list"), ("name", {"a": 1}, "Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_parameter_of_another_type_is_one_line(name, value, message):
    with pytest.raises(UserError, match=rf"^parameter {name}: {message}[^\n]*$"):
        checked(**{name: value})


def test_a_parameter_that_the_notebook_does_not_have_is_refused():
    """papermill only warns, and the notebook would run with its defaults."""
    for cell, hint in (("# Parameters\nstep = 3\n", "did you mean steps"), ("# Parameters\nx = 3\n", "there are name, wait")):
        with pytest.raises(UserError, match=rf"this notebook does not have it; {hint}"):
            checked(In=["", cell])
    assert checked(In=["", "# Parameters\nsteps = 3\n"], steps=3)["steps"] == 3

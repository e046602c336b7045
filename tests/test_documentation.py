"""The documentation builds, its links lead somewhere, and the contributor files are valid."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from ipykernel.kernelspec import get_kernel_dict

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cluster/**/*.md"), *ROOT.glob("notebooks/py/*.py")]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
BIN = Path(sys.executable).parent


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs form them."""
    titles = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_a_file_and_a_heading(page):
    generated = {"cli.md", *(f"tutorials/{path.stem}.md" for path in ROOT.glob("notebooks/py/*.py"))}
    for first, second in LINK.findall(page.read_text()):
        target, _, anchor = (first or second).partition("#")
        if re.match(r"[a-z]+:", target) or target in generated:
            continue
        folder = ROOT / "notebooks" if page.suffix == ".py" else page.parent
        file = (folder / target) if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


def test_readme_and_docs_have_at_most_45_000_words():
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
    assert sum(words.values()) <= 45_000, words


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_else(tmp_path):
    site = tmp_path / "site"
    done = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", site], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in site.rglob("*.html"):
        assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?://", page.read_text()), page
    commands = (site / "cli.html").read_text()
    assert "rstar-lab demo" in commands and not re.findall(r"<li><code>[\w-]+</code>: [^<]*\.\.\.", commands)
    pictures = [page.stem for page in (site / "tutorials").glob("*.html") if 'src="../images/' in page.read_text()]
    assert len(pictures) == 18, pictures


def test_workflows_follow_the_schema_and_run_make_targets():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    checked = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows], capture_output=True, text=True
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for workflow in workflows:
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            used = [step["run"].split()[1] for step in job["steps"] if step.get("run", "").startswith("make ")]
            assert used and set(used) <= targets


def test_citation_and_issue_templates_follow_their_schemas():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    for form in forms:
        body = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= body.keys() and all("type" in item for item in body["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["preferred-citation"]["authors"]


def test_versions_agree():
    project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    import rstar_lab

    assert project and project[1] == rstar_lab.__version__ == str(citation["version"])
    assert f"## {project[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_pre_commit_hooks_name_installed_programs():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook for repo in repos for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff-check", "ruff-format", "mypy", "nbstripout", "jupytext"}
    for hook in hooks:
        assert (BIN / hook["entry"].split("exec ")[1].split()[0]).exists(), hook["id"]


@pytest.mark.slow
@pytest.mark.parametrize("place", [".venv", "active environment"])
def test_pre_commit_hooks_run_from_the_environment_that_exists(place, tmp_path):
    for name in (".pre-commit-config.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    code = tmp_path / "code.py"
    code.write_text("x  =  1\n")
    path = "/usr/bin:/bin"
    if place == ".venv":
        (tmp_path / ".venv").symlink_to(BIN.parent)
    else:
        path = f"{BIN}:{path}"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "code.py"], cwd=tmp_path, check=True)
    command = [BIN / "pre-commit", "run", "ruff-format"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert code.read_text() == "x = 1\n", done.stdout + done.stderr


@pytest.mark.slow
def test_a_notebook_that_was_run_and_saved_shows_no_change_in_git(tmp_path):
    filters = re.findall(r"nbstripout (--keep-id [^\"]+)\"", (ROOT / "Makefile").read_text())
    assert len(filters) == 1 and f"nbstripout {filters[0]} " in (ROOT / ".pre-commit-config.yaml").read_text()
    (tmp_path / "notebooks" / "py").mkdir(parents=True)
    for name in (".gitignore", ".gitattributes", "notebooks/01_sandbox.ipynb", "notebooks/py/01_sandbox.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    clean = f"filter.nbstripout.clean={BIN}/nbstripout {filters[0]}"
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", clean]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    language = {"name": "python", "version": "3.99.0", "codemirror_mode": {"name": "ipython", "version": 3}}
    for path in (tmp_path / "notebooks").glob("*.ipynb"):
        book = nbformat.read(path, as_version=4)
        spec = {key: get_kernel_dict()[key] for key in ("display_name", "language")}
        book.metadata.update(language_info=language, kernelspec={**spec, "name": "python3"})
        for cell in book.cells:
            if cell.cell_type == "code":
                cell.update(execution_count=1, outputs=[nbformat.v4.new_output("stream", text="done")])
        nbformat.write(book, path)
    books = sorted((tmp_path / "notebooks").glob("*.ipynb"))
    subprocess.run([BIN / "jupytext", "--quiet", "--sync", *books], cwd=tmp_path, check=True)
    (tmp_path / "notebooks" / "my_shop.py").write_text("a module that a notebook wrote")
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    done = subprocess.run([*git, "status", "--short"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stdout == ""


def test_the_guide_for_assistants_is_short_and_names_what_exists():
    text = (ROOT / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 150
    named = {word for word in re.findall(r"`((?:rstar_lab|tests|docs|benchmarks|cli)/[\w./-]+)`", text)}
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "rstar_lab" / name).exists()]
    assert named and missing == []
    assert re.findall(r"`rstar-lab bench NAME`", text) and "AGENTS.md" in (ROOT / "CONTRIBUTING.md").read_text()

"""The path of docs/reproduce-the-paper.md, walked in small with the page's own commands (5 minutes on two idle cores)."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reproduce-the-paper.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return the page's commands for the small path: those that need no network, no GPU and no other machine."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    named = ("aime24", "aime25", "hmmt25", "math500", "dapo")  # a bare name is downloaded
    return [
        line.partition(" #")[0].replace("RECIPE", "paper_in_small").replace("PROFILE", "laptop")
        for line in lines
        if line.startswith(("python examples/", "rstar-lab "))
        and not any(f"data prepare {name} " in line for name in named)
        and not any(word in line for word in ("jobs logs", "jobs evaluate", "rstar-lab view"))
    ]


def test_the_page_has_every_command_of_the_small_path():
    names = [" ".join(shlex.split(line)[1:3]) for line in commands()]
    assert names.count("data convert") == 6 and names.count("data prepare") == 5
    assert [name for name in names if not name.startswith("data")] == [
        "examples/paper_in_small.py raw", "preflight paper_in_small", "jobs describe", "jobs submit", "jobs submit", "report --paper",
    ]  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_small_path_runs_from_the_commands_of_the_page(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    programs = {"python": sys.executable, "rstar-lab": str(Path(sys.executable).parent / "rstar-lab")}
    for line in commands():
        words = shlex.split(line)
        done = subprocess.run([programs[words[0]], *words[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        if words[1:3] == ["jobs", "submit"] and "--dry-run" not in words:
            code = "from rstar_lab.jobs import list_jobs; import sys; sys.exit(list_jobs('runs')[-1].watch() != 'finished')"
            watched = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
            assert watched.returncode == 0, watched.stdout[-3000:]
    info = json.loads((tmp_path / "runs" / "paper_in_small-rl" / "run.json").read_text())
    assert [stage["stage"] for stage in info["result"]["stages"]] == ["one", "two", "three"]
    page = (tmp_path / "out" / "paper.html").read_text()
    assert "Accuracy over the RL steps (Figure 1)" in page and "Stages (Figure 8)" in page

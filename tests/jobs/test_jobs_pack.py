"""What is sent with a job: the files that git does not ignore, up to a limit, without files that usually hold secrets."""

import subprocess

import pytest

from rstar_lab.common.errors import UserError
from rstar_lab.jobs.pack import pack


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name in ("code.py", "sub/more.py", "ignored/data.bin", "new.py", ".env", "server.pem", "runs/a/run.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".gitignore").write_text("ignored/\n")
    return root


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_that_git_does_not_ignore_are_sent_without_secrets(tree, tmp_path):
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    package = pack(tree, tmp_path / "out")
    assert names(tmp_path / "out") == [".gitignore", "code.py", "new.py", "sub/more.py"]
    assert package.files == 4
    assert ".env" in str(package) and "server.pem" in str(package), "the message names what was not sent"


def test_a_tree_without_git_is_sent_without_runs_and_secrets(tree, tmp_path):
    pack(tree, tmp_path / "out")
    assert "runs/a/run.json" not in names(tmp_path / "out")
    assert ".env" not in names(tmp_path / "out")


def test_a_tree_over_the_limit_is_rejected_before_copying(tree, tmp_path):
    (tree / "big.bin").write_bytes(bytes(2 << 20))
    with pytest.raises(UserError, match=r"big\.bin \(2 MB\)"):
        pack(tree, tmp_path / "out", limit_mb=1)
    assert not (tmp_path / "out").exists()

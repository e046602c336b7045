"""The common mistakes of the command line, one a row: each is one line that says what is wrong and what to do."""

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cases import read_cases
from helpers.command import exit_code
from helpers.small_disk import SmallDisk

from rstar_lab.common.errors import UserError
from rstar_lab.rl.overrides import parse_overrides

pytestmark = pytest.mark.slow
CLI = [sys.executable, "-m", "rstar_lab.cli"]
FILES = {
    "half.yaml": "rl: {lr: [1\n",
    "empty.yaml": "",
    "a.jsonl": '{"problem_id": "1", "question": "1+1", "answer": "2"}\n',
    "wrong.jsonl": '{"q": "1+1", "a": "2"}\n',
    "broken.jsonl": '{"question": "1+1", \n',
    "empty.jsonl": "",
    "text.csv": "hello",
    "short.parquet": "PAR",
    "folder/other.txt": "text",
    "runs/tiny-rl/run.json": "{}",
}
MISTAKES = read_cases(__file__, "cli_mistakes.yaml")["mistakes"]


def run(
    *arguments: str, cwd: Path, program: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    command = [*(program or CLI), *arguments]
    environment = os.environ | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def one_line(text: str) -> str:
    """Return the one line of an error output. Fails if there are more or it is no error line."""
    (line,) = text.splitlines()
    assert line.startswith("error: ") and "Traceback" not in line
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(("line", "code", "message"), MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_one_line_with_the_remedy(line, code, message, folder, monkeypatch, capfd):
    for name in ("RSTAR_LAB_SANDBOX_TOKEN", "RSTAR_LAB_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(folder)
    ended = exit_code(*shlex.split(line))
    output, errors = capfd.readouterr()
    assert message in one_line(errors) and ended == code
    assert not output
    changed = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(changed) == sorted(FILES)


def test_a_port_in_use_is_one_line(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("sandbox", "serve", "--port", port, cwd=folder)
        assert done.returncode == 1 and f"cannot listen on 127.0.0.1:{port}" in one_line(done.stderr)
        assert "Try another --port" in done.stderr


def test_a_full_disk_is_one_line(tmp_path):
    disk = SmallDisk(tmp_path, "size")
    try:
        disk.fill()
        done = run("data", "synthesize", "--count", "300", "--out", str(disk.folder / "x.jsonl"), cwd=tmp_path)
        assert done.returncode == 1 and disk.reason in one_line(done.stderr) and "free disk space" in done.stderr
    finally:
        disk.unmount()


def test_a_second_start_at_once_is_one_line(tmp_path):
    hold = (
        "import sys; from pathlib import Path; from rstar_lab.runs.lock import RunLock\n"
        "lock = RunLock(Path('runs/tiny_fast-sft')); print('held', flush=True); sys.stdin.read()"
    )
    (tmp_path / "runs" / "tiny_fast-sft").mkdir(parents=True)
    first = subprocess.Popen(
        [sys.executable, "-c", hold], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        done = run("sft", "tiny_fast", cwd=tmp_path)
        assert done.returncode == 1 and f"is being written by process {first.pid}" in one_line(done.stderr)
    finally:
        first.communicate()


@pytest.mark.parametrize(
    ("package", "line", "extra"),
    [
        ("plotly", "report tiny-rl", "analysis"),
        ("torch", "serve folder", "cpu"),
        ("fastapi", "sandbox serve --port 0", "sandbox"),
        ("mcp", "mcp --runs-dir runs", "mcp"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(package, line, extra, folder):
    program = f"import sys; sys.modules[{package!r}] = None; from rstar_lab.cli import main; sys.argv[0] = 'rstar-lab'; main()"
    done = run(*line.split(), cwd=folder, program=(sys.executable, "-c", program))
    assert done.returncode == 1 and f"pip install '.[{extra}]'" in one_line(done.stderr)


@pytest.mark.parametrize("on_path", [True, False])
def test_commands_in_messages_and_help_are_those_of_this_shell(on_path, folder):
    own = Path(sys.executable).with_name("rstar-lab")
    environment = os.environ | {"PATH": f"{own.parent}:/usr/bin:/bin" if on_path else "/usr/bin:/bin"}
    shown = "rstar-lab" if on_path else str(own)
    for arguments in (("runs", "show", "nothing"), ("train", "--help")):
        done = subprocess.run([own, *arguments], cwd=folder, capture_output=True, text=True, env=environment)
        expected = f"`{shown} runs list`" if arguments[0] == "runs" else f"{shown} train tiny_fast"
        assert expected in " ".join((done.stdout + done.stderr).split()), done


def test_every_quoting_that_bash_passes_on_is_understood(tmp_path):
    for written in (
        "rl.lr=1e-4", "'rl.lr=1e-4'", '"rl.lr = 1e-4"', "rl.lr='1e-4'", 'rl.lr="1e-4"', "rl.lr=0.0001",
    ):  # fmt: skip
        assert parse_overrides(bash_words(written)) == {"rl.lr": 1e-4}, written
    assert parse_overrides(bash_words("name=\\'010\\'")) == {"name": "010"}  # quotes that reach us keep the text
    for written in (
        "rl.tools=[m:f]", "'rl.tools=[m:f]'", "\"rl.tools=['m:f']\"", "'rl.tools=[\"m:f\"]'", 'rl.tools="[m:f]"',
    ):  # fmt: skip
        assert parse_overrides(bash_words(written)) == {"rl.tools": ["m:f"]}, written
    with pytest.raises(UserError, match="the value is not YAML"):
        parse_overrides(bash_words("'rl.tools=[m:f'"))


def bash_words(written: str) -> list[str]:
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {written}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]

"""A host in the hands of somebody else: what it answers runs nothing here, writes into no other folder and is no markup."""

import os

import pytest
from helpers.jobs import job_spec

from rstar_lab.common.errors import UserError
from rstar_lab.hardware.profiles import Ssh, load_profile
from rstar_lab.jobs import JobBoard
from rstar_lab.jobs.ssh.connection import Agent, Connection
from rstar_lab.jobs.ssh.mirror import pull_run
from rstar_lab.jobs.store import JobFolder
from rstar_lab.rl.overrides import load_recipe


def own_job(runs, job_id="mine", backend="local", handle=None):
    folder = JobFolder.of(runs, job_id)
    folder.save(job_spec(runs, job_id, backend=backend, handle=handle or {}))
    return folder.path


class Host:
    """A host in the hands of somebody else. answers: operation -> its answer."""

    runs, connection = "/runs", Connection(Ssh(host="host.example"))

    def __init__(self, **answers):
        self.answers = answers

    def request(self, operation, **_):
        return self.answers[operation]


def listing(**changes):
    """The answer of a host about its run."""
    return {"metrics": "", "status": "running"} | changes


@pytest.mark.parametrize("run_id", [".jobs/mine", ".jobs", "a/b", ""])
def test_a_host_names_no_folder_but_that_of_a_run(tmp_path, run_id):
    """`.jobs/mine` replaced job.json of that job."""
    before = own_job(tmp_path) / "job.json"
    text = before.read_text()
    with pytest.raises(UserError, match="cannot be copied"):
        pull_run(Host(committed=listing()), run_id, tmp_path, True)
    assert before.read_text() == text and list(before.parent.iterdir()) == [before]


@pytest.mark.parametrize(
    "answer",
    [
        None, [], 5, {}, listing(metrics=5), listing(metrics="a"), listing(status=None), listing(status=["x"]),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_one_error(tmp_path, answer):
    with pytest.raises(UserError, match="answer cannot be read"):
        pull_run(Host(committed=answer), "run", tmp_path, False)


MARKUP = "x'><img src=x onerror=alert(1)>"


@pytest.mark.parametrize(
    "row",
    [
        {"status": MARKUP, "progress": {}}, {"status": ["running"], "progress": {}}, {"status": "running"}, None, "x",
        {"status": "running", "progress": {"event": {"a": 1}, "done": 1, "line": ["x"], "total": "y"}},
        {"status": "running", "progress": {"event": MARKUP, "done": 1e400, "line": MARKUP}},
        {"status": "running", "progress": [1]},
    ],
)  # fmt: skip
def test_what_a_host_says_is_no_markup_and_does_not_end_the_board(tmp_path, monkeypatch, row):
    own_job(tmp_path, "mine", "ssh", {"ssh": Ssh(host="host.example").model_dump(), "code": "/x", "runs": "/y"})
    own_job(tmp_path, "local")
    rows = [row | {"id": "mine"} if isinstance(row, dict) else row]
    monkeypatch.setattr("rstar_lab.jobs.ssh.connection.agent_of", lambda _: Host(jobs=rows))
    board = JobBoard(tmp_path)
    page = board.to_html()
    assert "<img" not in page and "class='rl-x'" not in page
    found = {row.id: row.status for row in board.rows()}
    assert found["local"] == "queued" and found["mine"] in ("running", "unknown")


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [ALIASES, "model: &a [*a]\n", "rl: &a {prompt: *a}\n", "a: " + "{a: " * 2000, "seed: " + "9" * 5000, b"\xff\xfe"],
    ids=["aliases", "list in itself", "mapping in itself", "deep", "number", "bytes"],
)
def test_yaml_of_somebody_else_is_read_or_refused_in_one_line(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"x\.yaml"):
        load_recipe(path, profile=load_profile("laptop"))
    with pytest.raises(UserError, match=r"x\.yaml"):
        load_profile(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sent", ["yes", "yes >&2", "head -c 99000000 /dev/zero"])
def test_a_host_that_sends_without_end_is_one_error(tmp_path, monkeypatch, sent):
    """It filled the memory, or the disk with messages of ssh, and its lines were read for ever."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nexec {sent}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("rstar_lab.jobs.ssh.connection.MAX_OUTPUT_BYTES", 2**20)
    monkeypatch.setattr("rstar_lab.jobs.ssh.connection.MAX_ANSWER_BYTES", 2**20)
    monkeypatch.setattr("rstar_lab.jobs.ssh.connection.START_S", 1.0)
    connection = Connection(Ssh(host="host.example"))
    with pytest.raises(UserError, match="output is longer than 1048576 bytes"):
        connection.run("true")
    agent = Agent(connection, "/code", "/runs")
    with pytest.raises(
        UserError, match=r"did not answer within 1 s|longer than 1048576 bytes|cannot start: y y y|lost: "
    ):
        agent.request("describe")
    agent.close()

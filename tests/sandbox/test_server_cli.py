"""Tests of the `rstar-lab sandbox` commands."""

import json

import pytest
from typer.testing import CliRunner

from rstar_lab.cli.sandbox import app


@pytest.mark.slow
def test_check_names_every_layer_and_strict_is_an_exit_status():
    lines = CliRunner().invoke(app, ["check", "--json"])
    layers = [json.loads(line) for line in lines.stdout.splitlines()]
    assert lines.exit_code == 0 and {"seccomp", "landlock", "network namespace", "cgroup"} <= {
        x["name"] for x in layers
    }
    assert all(bool(layer["leaves_open"]) != layer["present"] for layer in layers)
    printed = CliRunner().invoke(app, ["check"]).stdout
    assert "not guaranteed: a program makes no system call to the host's kernel" in printed
    strict = CliRunner().invoke(app, ["check", "--strict"])
    assert strict.exit_code == (0 if all(layer["present"] for layer in layers) else 1)
    assert "seccomp" in strict.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--workers", "0"], "--workers"),
        (["serve", "--time-limit", "1e9"], "--time-limit"),
        (["serve", "--token-file", "/nowhere"], "--token-file"),
        (["worker"], "--redis"),
    ],
)
def test_an_error_names_the_wrong_option(arguments, word, monkeypatch):
    monkeypatch.delenv("RSTAR_LAB_REDIS_URL", raising=False)
    result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 2 and word in result.output


def test_help_lists_every_command():
    help_text = CliRunner().invoke(app, ["--help"]).output
    assert all(command in help_text for command in ("serve", "worker", "check"))

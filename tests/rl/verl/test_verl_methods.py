"""Every method of `rl/methods` has the streams of the local trainer under verl, or is refused by its name before the job starts."""

import pickle
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from rstar_lab.rl.algorithm.selection import select_rollouts
from rstar_lab.rl.algorithm.streams import Streams
from rstar_lab.rl.methods import AnyMethod, UserMethod
from rstar_lab.rl.methods.method import Addition
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.preflight.run import Status, preflight
from rstar_lab.rl.rollout.records import read_trajectories
from rstar_lab.rl.training.teacher import TeacherPasses
from rstar_lab.rl.verl.settings import Settings
from rstar_lab.rl.verl.transcripts import split
from rstar_lab.rl.verl.unsupported import unsupported_options
from rstar_lab.runs.reader import RunReader

GOLDEN = Path(__file__).parents[2] / "golden/runs/tiny_fast-rl"
# Required keys of the methods that have some.
KEYS = {
    "opd": {"weight": 0.1}, "sdpo": {"weight": 0.1}, "echo": {"weight": 0.1}, "branching": {"entropy": 0.1},
    "overlong_buffer": {"tokens": 32}, "repetition": {"weight": 0.5, "ngram": 3}, "tool_budget": {"weight": 0.5},
    "cross_policy": {"url": "http://127.0.0.1:9", "share": 0.5},
}  # fmt: skip
REFUSED = {"otb", "sdpo", "branching", "cross_policy"}


def names(union):
    """Return the types of the methods of a union."""
    return [
        section.model_fields["type"].default for section in get_args(get_args(union)[0]) if section is not UserMethod
    ]


METHODS = [{"type": name} for name in names(AnyMethod)]
METHODS += [{"add": [{"type": name} | KEYS.get(name, {})]} for name in names(Addition)]


def settings_of(**method):
    """Return the settings of a stage with a method."""
    recipe = {
        "name": "m", "model": "/models/m", "engine": {"teacher_url": "http://127.0.0.1:9"},
        "rl": {"problems_per_step": 4, "group_size": 8, "method": method, "correction": {"type": "tis"}},
        "stages": [{"name": "one", "problems": {"synthetic": {"count": 4}}, "steps": 1}],
    }  # fmt: skip
    if "opd" not in str(method):
        del recipe["engine"]
    made = parse_recipe(recipe)
    return Settings(made, made.stages[0], "m-rl", Path("runs"), 1)


class Teacher(TeacherPasses):
    """Returns log-probs that depend on the tokens, as a server would."""

    async def teacher_log_probs(self, rollouts):
        return [-np.asarray(t.response_ids, np.float32) / 100 for t in rollouts]


async def streams_of(settings, rollouts):
    """Return the streams of the kept rollouts and their order, as both trainers compute them from rollouts."""
    hooks = settings.rl.hooks
    selection = select_rollouts(rollouts, hooks, seed=7)
    for method in hooks:
        if method.forward_phase is not None:
            selection = await method.forward(selection, rollouts, Teacher(None))
    kept = [t.traj_id for t in selection.trajectories]
    metrics = {name: value for method in hooks for name, value in method.metrics(rollouts).items()}
    return kept, selection.streams, selection.left_out, metrics


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.get("type") or method["add"][0]["type"])
async def test_a_method_has_the_local_trainers_streams_or_is_refused(method):
    name = method.get("type") or method["add"][0]["type"]
    settings = settings_of(**method)
    refused = unsupported_options(settings.recipe)
    assert bool(refused) == (name in REFUSED)
    if refused:
        assert len(refused) == 1 and refused[0].startswith("stages.one: method.") and name in refused[0]
        return
    rollouts, _ = read_trajectories(RunReader(GOLDEN), 2)
    # What the trainer's process of verl gets: pickled by a worker, without texts if no method reads them.
    sent = [pickle.loads(pickle.dumps(split(t, with_texts=settings.reads_texts)[0])).outline for t in rollouts]
    mine, theirs = [await streams_of(settings, each) for each in (rollouts, sent)]
    assert mine[0] and mine[0] == theirs[0] and mine[2:] == theirs[2:]
    for own, other in zip(mine[1], theirs[1], strict=True):
        for stream in Streams.__slots__:
            np.testing.assert_array_equal(getattr(own, stream), getattr(other, stream), err_msg=stream)


FORWARD = """
from dataclasses import replace

class Statistics:
    async def forward(self, selection, rollouts, passes):
        found = await passes.statistics(selection.trajectories)
        return replace(selection, measured=(found.log_probs, found.entropies))

class LogProbs:
    async def forward(self, selection, rollouts, passes):
        await passes.log_probs([t for t in rollouts if t.reward <= 0])
        return selection

class Prompt:
    async def forward(self, selection, rollouts, passes):
        passes.prompt_ids(rollouts[0], "another question")
        return selection

class Teacher:
    async def forward(self, selection, rollouts, passes):
        await passes.teacher_log_probs(selection.trajectories)
        return selection

class Fails:
    async def forward(self, selection, rollouts, passes):
        return rollouts[7]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Statistics", "forward passes of the policy; use the local trainer"),
        ("LogProbs", "forward passes of the policy; use the local trainer"),
        ("Prompt", "methods that change a prompt; use the local trainer"),
        ("Teacher", None),
        ("Fails", None),
    ],
)
async def test_preflight_refuses_own_methods_that_need_passes_of_the_policy(name, words, tmp_path, monkeypatch):
    (tmp_path / "own_forward.py").write_text(FORWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = unsupported_options(settings_of(type=f"own_forward:{name}").recipe)
    assert len(lines) == bool(words)
    if words:
        assert lines[0].startswith(f"stages.one: method.type: own_forward:{name}: the hook `forward`: ")
        assert words in lines[0]
        findings = preflight("release_dapo", "h100x8", {"rl.method.type": f"own_forward:{name}"})
        (found,) = [finding for finding in findings if finding.check == "unread keys"]
        assert found.status is Status.FAIL and lines[0].partition(": ")[2] in found.message

"""Tests of `rewind`: the same steps without changes, other steps with one, and errors."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from helpers.scored_run import RECIPE, make_model
from helpers.scripted_training import metrics_without_times
from safetensors.torch import load_file
from typer.testing import CliRunner

from rstar_lab.cli.command_line import app
from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl import pipeline, rewind
from rstar_lab.rl.overrides import load_recipe, parse_recipe
from rstar_lab.rl.resolved import resolve
from rstar_lab.runs.reader import RunReader

OWN = ["helpers.scored_run:score"]  # what the recipe of the run names


def train(recipe) -> None:
    async def main() -> None:
        async with pipeline.RunSession.open(resolve(recipe), Reporter()) as session:
            await pipeline.train(session, Path(recipe.model))

    asyncio.run(main())


def result(runs_dir: Path):
    reader = RunReader(runs_dir / "scored-rl")
    rows = reader.read("transcripts", columns=["traj_id", "response_ids", "engine_log_probs", "trainer_log_probs"])
    files = load_file(reader.checkpoints()[5] / "model.safetensors")
    weights = {name: tensor.numpy().tobytes() for name, tensor in files.items()}
    return metrics_without_times(reader.run_dir), repr(rows.to_pylist()), weights


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    make_model(folder / "model")
    train(parse_recipe(RECIPE | {"runs": str(folder), "model": str(folder / "model")}))
    return folder


@pytest.mark.slow
def test_a_rewound_run_without_changes_repeats_the_steps_bit_for_bit(original: Path, tmp_path: Path):
    assert list(RunReader(original / "scored-rl").checkpoints()) == [4, 5]
    recipe = load_recipe(rewind(original / "scored-rl", 5, tmp_path / "again", functions=OWN))
    copied = RunReader(tmp_path / "again" / "scored-rl")
    assert list(copied.checkpoints()) == [4]
    train(recipe)
    assert result(tmp_path / "again") == result(original)
    assert copied.info["attempts"] == 2, "the last step was not repeated"


@pytest.mark.slow
def test_an_override_changes_only_the_steps_after_the_checkpoint(original: Path, tmp_path: Path):
    command = ["rewind", "scored-rl", "5", str(tmp_path / "other"), "--set", "rl.lr=0.01", "--functions", *OWN]
    done = CliRunner().invoke(app, [*command, "--runs-dir", str(original), "--json"])
    assert done.exit_code == 0, done.output
    recipe = load_recipe(json.loads(done.stdout)["recipe"])
    assert recipe.rl.lr == 0.01
    train(recipe)
    old, new = result(original), result(tmp_path / "other")
    assert new[0][:4] == old[0][:4] and new[2] != old[2]


@pytest.mark.slow
def test_a_rewound_run_has_no_copy_of_a_linked_file(original: Path, tmp_path: Path):
    """The run folder may come from somebody else."""
    secret, runs = tmp_path / "id_rsa", tmp_path / "runs"
    secret.write_text("secret")
    shutil.copytree(original / "scored-rl", runs / "scored-rl")
    for place in ("scored-sft/notes.txt", "scored-rl/checkpoints/step=000004/notes.txt"):
        (runs / place).parent.mkdir(parents=True, exist_ok=True)
        (runs / place).symlink_to(secret)
    rewind(runs / "scored-rl", 5, tmp_path / "again", functions=OWN)
    copied = [path for path in (tmp_path / "again").rglob("notes.txt")]
    assert len(copied) == 2 and all(path.is_symlink() for path in copied)


def test_the_help_says_which_checkpoint_is_used():
    shown = " ".join(CliRunner().invoke(app, ["rewind", "--help"]).stdout.split())
    assert "a run up to its newest checkpoint before STEP" in shown and "First step to repeat" not in shown


@pytest.mark.slow
def test_errors_name_the_reason(original: Path, tmp_path: Path):
    run = original / "scored-rl"
    with pytest.raises(UserError, match=r"no checkpoint before step 3 \(stored: 4, 5\)"):
        rewind(run, 3, tmp_path / "a")
    with pytest.raises(UserError, match="cannot change name"):
        rewind(run, 5, tmp_path / "a", {"name": "x"})
    with pytest.raises(UserError, match="lrr"):
        rewind(run, 5, tmp_path / "a", {"rl.lrr": 1}, OWN)
    assert not (tmp_path / "a").exists(), "a failed rewind left files"
    missing = CliRunner().invoke(app, ["rewind", "other-rl", "5", str(tmp_path / "a")])
    assert isinstance(missing.exception, UserError) and "no run other-rl in runs/" in str(missing.exception)
    with pytest.raises(UserError, match="exists"):
        rewind(run, 5, original)


@pytest.mark.slow
def test_rewind_does_not_make_commands_of_a_foreign_recipe_yours(original: Path, tmp_path: Path):
    shutil.copytree(original, tmp_path / "runs")
    path, command = tmp_path / "runs" / "scored-rl" / "run.json", "mcp+stdio:sh -c 'id > PWNED'"
    info = json.loads(path.read_text())
    info["recipe"]["rl"]["tools"] = ["python", command]
    path.write_text(json.dumps(info))
    with pytest.raises(UserError, match=r"mcp\+stdio:sh .*--functions"):
        rewind(path.parent, 5, tmp_path / "into")
    assert not (tmp_path / "into").exists()
    assert command in rewind(path.parent, 5, tmp_path / "into", functions=[command, *OWN]).read_text()

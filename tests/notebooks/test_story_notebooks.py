"""Tests of notebooks 00, 02, 03, 06 and 10 with papermill, on the golden runs and with small real jobs."""

import re
from pathlib import Path

import pytest
from helpers.notebooks import GOLDEN, SMALL, execute, outputs

from rstar_lab.jobs.store import JobFolder, JobSpec
from rstar_lab.rl.demo import make_report
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.runs.reader import RunReader


@pytest.mark.slow
def test_quickstart_shows_the_results_of_the_golden_runs(tmp_path):
    text = outputs(execute("00_quickstart.ipynb", tmp_path, {"runs_dir": str(GOLDEN)}))  # by default the newest demo
    rise = RunReader(GOLDEN / "tiny_fast-eval-rl").info["result"]["pass1"][0]
    assert f"{rise:.1%} [" in text and "after RL" in text
    assert "application/vnd.plotly.v1+json" in text


@pytest.fixture(scope="module")
def ablation(tmp_path_factory):
    """Run a grid of two arms as jobs, which share one SFT."""
    folder = tmp_path_factory.mktemp("ablation")
    arms = {"GRPO": {"rl.method.roc.rule": "none"}, "RoC (paper)": {"rl.method.roc.rule": "paper"}}
    parameters = {
        "runs_dir": str(folder / "runs"),
        "recipe": "tiny",
        "seeds": [0],
        "steps": 2,
        "arms": arms,
        "overrides": SMALL,
        "train": True,
    }
    return folder, parameters, execute("06_ablation.ipynb", folder, parameters)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ablation_runs_its_grid_once(ablation):
    folder, parameters, notebook = ablation
    runs = folder / "runs"
    for arm in ("grpo", "roc--paper-"):
        reader = RunReader(runs / f"ablation-{arm}-s0-rl")
        assert reader.status == "finished" and len(reader.steps()) == 2
    assert "application/vnd.plotly.v1+json" in outputs(notebook)
    written = {path: path.stat().st_mtime_ns for path in runs.rglob("run.json")}
    execute("06_ablation.ipynb", folder, parameters)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("run.json")} == written


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_training_notebook_submits_a_job_and_attaches_to_it(ablation):
    folder, _, _ = ablation
    model = folder / "runs" / "ablation-sft" / "sft" / "model"
    overrides = SMALL | {"model": str(model), "sft": None, "stages.0.steps": 1, "evaluate.sets": {}}
    del overrides["sft.problems.synthetic.count"]
    settings = {"recipe": "tiny", "name": "again", "runs_dir": str(folder / "runs")}
    execute("03_train.ipynb", folder, settings | {"overrides": overrides})
    assert RunReader(folder / "runs" / "again-rl").status == "finished"
    from rstar_lab.jobs import list_jobs

    job = next(job for job in list_jobs(folder / "runs") if job.spec.run == "again-rl")
    execute("03_train.ipynb", folder, settings | {"job_id": job.id})


@pytest.fixture(scope="module")
def three_stage_recipe(tmp_path_factory):
    """Run a recipe with SFT and three stages of one step each."""
    folder = tmp_path_factory.mktemp("recipe")
    overrides = SMALL | {
        "stages.one.steps": 1,
        "stages.two.steps": 1,
        "stages.three.steps": 1,
        "stages.three.limits.max_response_tokens": 64,
        "stages.three.problems.synthetic.count": 6,
        "evaluate.sets.easy.synthetic.count": 4,
        "evaluate.sets.hard.synthetic.count": 4,
        "evaluate.samples": 1,
    }
    parameters = {"recipe": "tiny_three_stage", "overrides": overrides, "runs_dir": str(folder / "runs")}
    return folder, parameters, execute("10_recipe.ipynb", folder, parameters)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_three_stage_recipe_shows_its_stages(three_stage_recipe):
    folder, _, notebook = three_stage_recipe
    shown = outputs(notebook)
    for stage in ("one", "two", "three"):
        assert f"after stage {stage}" in shown
    assert "of 6 problems kept" in shown
    assert (folder / "runs" / "tiny_three_stage-rl" / "stages" / "two" / "model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_sft_notebook_shows_conversations_and_reuses_results(three_stage_recipe):
    folder, parameters, _ = three_stage_recipe
    model = folder / "runs" / "tiny_three_stage-sft" / "sft" / "model" / "model.safetensors"
    written = model.stat().st_mtime_ns
    shown = outputs(execute("02_sft.ipynb", folder, parameters))
    assert "<mark>" in shown and "error_then_fix" in shown
    assert "before training" in shown and "after SFT" in shown and "hard" in shown
    assert model.stat().st_mtime_ns == written


@pytest.mark.slow
def test_the_demo_report_draws_figures_offline(tmp_path):
    page = make_report(load_recipe("tiny_fast", {"runs": str(GOLDEN)}), tmp_path).read_text()
    assert page.count("plotly-graph-div") >= 3 and "not drawn here" not in page
    assert not re.search(r'<script src="https?:', page)
    assert "@jupyter-widgets/html-manager@" not in page and "mermaid.esm.min.mjs" not in page


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("03_train", {"wait": False}), ("06_ablation", {"train": False})])
def test_notebooks_run_to_their_end_without_any_step(tmp_path, name, settings):
    folder = JobFolder.of(tmp_path, "job")
    folder.save(JobSpec("job", "tiny", "laptop", "local", [], str(tmp_path), str(tmp_path), {}, "now", run="tiny-rl"))
    folder.log.write_text("")
    settings = {"runs_dir": str(tmp_path)} | settings | ({"job_id": "job"} if name == "03_train" else {})
    shown = outputs(execute(f"{name}.ipynb", tmp_path, settings))
    assert "no step yet" in shown or "no runs ablation-*-rl yet" in shown
    assert "Traceback" not in shown

"""The pieces of a recipe's run: where SFT runs, and what a step's progress line shows."""

from pathlib import Path

import torch

from rstar_lab.progress import Reporter
from rstar_lab.rl import pipeline
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.session import RunSession

SFT = {"problems": {"synthetic": {"count": 1}}}


async def test_sft_runs_on_the_accelerator(tmp_path, monkeypatch):
    devices = []

    async def sft_data(session: RunSession, run_dir: Path):
        dataset = [[("a question", False), ("an answer", True)]]
        pipeline.make_base(session.recipe, dataset, run_dir / "base")
        return dataset

    def sft(model, *arguments, **options):
        devices.append({parameter.device.type for parameter in model.parameters()})
        return {}

    monkeypatch.setattr(pipeline, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(pipeline, "sft_data", sft_data)
    monkeypatch.setattr(pipeline, "sft", sft)
    recipe = parse_recipe({"name": "r", "model": "tiny", "vocabulary": 300, "runs": str(tmp_path), "sft": SFT})
    async with RunSession.open(recipe, Reporter(True)) as session:
        await pipeline.fine_tune(session)
    assert devices == [{"meta"}]


def test_progress_line_shows_the_share_of_correct_answers():
    metrics = {
        "reward": 10.0, "correct": 0.25, "error_rate": 0.5, "error_rate_correct": None, "response_tokens": 10.0,
        "kept": 4, "generate_s": 1.0, "update_s": 2.0,
    }  # fmt: skip
    assert pipeline.step_line(metrics).startswith("pass 25%")

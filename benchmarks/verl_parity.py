"""Train one recipe with the local trainer and with verl, using a scripted engine, and compare the two runs."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.verl_scripted import ScriptedEngines
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import exit_with_parent
from rstar_lab.rl.environments.mixture import load_environments, make_environments
from rstar_lab.rl.models.model import build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.renderers.formats import render_prompt
from rstar_lab.rl.resolved import read_stage_problems
from rstar_lab.rl.reward import reward
from rstar_lab.rl.section import merged
from rstar_lab.rl.session import tool_maker
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.sandbox import Limits, LocalSandbox

RUN = "parity-rl"
TOLERANCE = 1e-4  # relative, for metrics: float32 sums in a different order


def prepare(
    folder: Path,
    *,
    steps: int = 2,
    problems_per_step: int = 4,
    group_size: int = 4,
    evaluate: Mapping[str, Any] | None = None,
    stage: Mapping[str, Any] | None = None,
    **rl: Any,
) -> Path:
    """Create a tiny model, problems and a recipe in `folder`; return the recipe file.

    evaluate, rl: keys of the recipe. stage: keys of its only stage.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = ["42"] * 7 + ["unknown"]
    problems = [
        Problem(problem_id=f"p{i}", question=f"What is six times seven? ({i})", answer=answer)
        for i, answer in enumerate(answers)
    ]
    write_problems(folder / "problems.jsonl", problems)
    texts = [render_prompt(problem.question) for problem in problems]
    tokenizer = train_tokenizer(texts, 512)
    model = build_tiny(
        tokenizer, seed=0, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_length=4096
    )
    save_model(folder / "model", model, tokenizer)
    defaults = {
        "problems_per_step": problems_per_step,
        "group_size": group_size,
        "method": {"roc": {"oversample": 2}},
        "lr": 1e-3,
        "warmup_steps": 0,
        "limits": {"max_response_tokens": 512, "max_turns": 3},
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
        "token_arrays": "all",
    }
    recipe = {
        "name": RUN.removesuffix("-rl"),
        "model": str(folder / "model"),
        "rl": merged(defaults, rl),
        "stages": [
            {"name": "one", "problems": {"file": str(folder / "problems.jsonl")}, "steps": steps, **(stage or {})}
        ],
        # The scripted log-probs are constants, so they do not match the model.
        "engine": {"dtype": "float32", "mismatch_limit": 1e9},
        "sandbox": {"workers": 1, "timeout_s": 5.0, "memory_mb": 256},
        "evaluate": dict(evaluate or {}),
    }
    path = folder / "parity.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def train_locally(recipe_file: Path, runs_dir: Path) -> Path:
    """Train with the local trainer; return the folder of the run."""
    recipe = load_recipe(recipe_file)
    return asyncio.run(_train_locally(recipe, runs_dir))


async def _train_locally(recipe: Recipe, runs_dir: Path) -> Path:
    section = recipe.sandbox
    limits = Limits(timeout_s=section.timeout_s, memory_mb=section.memory_mb)
    with RunWriter.open(runs_dir, RUN, kind="train", recipe=recipe.model_dump(mode="json"), seed=recipe.seed) as writer:
        async with LocalSandbox(limits, section.workers, isolation=section.isolation) as sandbox:
            make_tools = tool_maker(recipe, sandbox)
            trainer = Trainer(
                recipe,
                model=load_model(recipe.model, torch.float32),
                tokenizer=load_tokenizer(recipe.model),
                engines=ScriptedEngines(recipe.model),  # type: ignore[arg-type]
                tools=make_tools(recipe.rl.tools),
                reward=reward,
                writer=writer,
                problems={stage.name: read_stage_problems(recipe, stage) for stage in recipe.stages},
                on_step=lambda metrics: None,
                environments=make_environments(recipe.rl, load_environments(recipe.rl), make_tools),
            )
            await trainer.run()
        return writer.run_dir


def start_verl(recipe_file: Path, runs_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start verl's trainer on the CPU in its own process session. Its output is in runs_dir/verl.log. It ends with this process."""
    factory = "verl.+actor_rollout_ref.rollout.engine_kwargs.rstar={factory: 'benchmarks.verl_scripted:serve'}"
    command = [
        sys.executable, "-m", "rstar_lab.rl.verl.train", str(recipe_file), "--profile", "laptop",
        "--runs-dir", str(runs_dir), "--set", factory, *arguments,
    ]  # fmt: skip
    runs_dir.mkdir(parents=True, exist_ok=True)
    # The processes of verl import this package for the scripted engine.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"NO_COLOR": "1", "PYTHONPATH": path}
    with (runs_dir / "verl.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=exit_with_parent
        )


def train_with_verl(recipe_file: Path, runs_dir: Path, *arguments: str, timeout_s: float = 1800) -> Path:
    """Run `start_verl`, wait for its end and return the run's folder. Raises UserError if it fails."""
    process = start_verl(recipe_file, runs_dir, *arguments)
    try:
        code = process.wait(timeout_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        log = (runs_dir / "verl.log").read_text(errors="replace")[-3000:]
        raise UserError(f"verl exited with code {code}; end of {runs_dir / 'verl.log'}: {log}")
    return runs_dir / RUN


@dataclass(frozen=True)
class ParityReport:
    """The result of `compare`. differences: one line each; empty means parity."""

    steps: int
    rollouts: int
    differences: list[str]


def compare(ours: Path, theirs: Path) -> ParityReport:
    """Compare two runs: kept rollouts, advantages, masks, tokens, rewards and penalties exactly, all metrics but times to TOLERANCE."""
    differences: list[str] = []
    tables = [_rows(run) for run in (ours, theirs)]
    if tables[0].keys() != tables[1].keys():
        differences.append(f"rollouts: {sorted(tables[0].keys() ^ tables[1].keys())[:3]} are in one run only")
    for name in tables[0].keys() & tables[1].keys():
        a, b = tables[0][name], tables[1][name]
        for column in ("kept", "advantage", "reward", "p_err", "p_format", "loss_mask", "response_ids", "outcomes"):
            if not np.array_equal(np.asarray(a[column]), np.asarray(b[column])):
                differences.append(f"{name}: {column} {a[column]} against {b[column]}")
    metrics = [{line["step"]: line for line in RunReader(run).metrics()} for run in (ours, theirs)]
    for step in metrics[0]:
        for key, x in metrics[0][step].items():
            if key == "stage" or key.endswith("_s"):  # seconds
                continue
            y = metrics[1].get(step, {}).get(key)
            if x is None or y is None:
                same = x is y
            else:
                same = np.isclose(x, y, rtol=TOLERANCE, atol=1e-5)
            if not same:
                differences.append(f"step {step}: {key} {x} against {y}")
    return ParityReport(len(metrics[0]), len(tables[0]), differences)


def _rows(run: Path) -> dict[str, dict[str, Any]]:
    """Return traj_id -> columns of its trajectory and its transcript."""
    import pyarrow.dataset as ds

    rows: dict[str, dict[str, Any]] = {}
    for level in ("trajectories", "transcripts"):
        for row in ds.dataset(run / level, partitioning=None).to_table().to_pylist():
            rows.setdefault(row["traj_id"], {}).update(row)
    return rows

"""Faults in TRL's GRPOTrainer: those of the checks (`rstar-lab inject --trainer trl`), and those that the doctor must name from
TRL's log.

    python -m benchmarks.trl_faults FOLDER   # 12 steps with each fault of FAULTS and 3 without, then the doctor on their logs

TRL runs in its own environment (`trl_environment`), with transformers as the engine. It starts from the same SFT model, with the
same problems, tool and reward. `inject` counts a fault as noticed if TRL raises an error or logs a warning that it does not log
without a fault.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.doctor import PAGE, first_steps, interval, named, replace_part
from benchmarks.planted import LR, PLANTED
from benchmarks.short_runs import sft_model
from benchmarks.trainer import TRL, trl_environment
from rstar_lab.common.errors import UserError
from rstar_lab.common.resources import benchmark_file
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question
from rstar_lab.rl.resolved import read_problems, read_stage_problems

PROMPTS, GROUP = 8, 8
# Faults that cannot occur in this set-up of TRL -> reason.
NOT_APPLICABLE = {"no-log-probs": "TRL uses log-probs of the engine only with vLLM"}


@dataclass(frozen=True)
class TrlRun:
    """What a run of TRL reported.

    error: text of the exception that ended it, or None. warnings: distinct warnings, in order. steps: number of finished
    steps. calls: mean tool calls per rollout. metrics: last value of each number that TRL logged.
    """

    error: str | None
    warnings: list[str]
    steps: int
    calls: float
    metrics: dict[str, float]


def run_trl(
    fault: str,
    model: Path,
    training: Sequence[Problem],
    held_out: Sequence[Problem],
    *,
    steps: int,
    max_tokens: int,
    max_turns: int,
    timeout_s: float,
) -> TrlRun:
    """Train `steps` steps with TRL from the model in a folder, with one fault (or "none").

    training, held_out: problems of TRL's training and evaluation set. timeout_s: CPU time limit of one tool call.
    Raises UserError if TRL cannot be installed or started.
    """
    with tempfile.TemporaryDirectory(prefix="rstar-trl-") as name:
        rows = [_row(problem) for problem in training[: PROMPTS * steps]]
        task = {
            "fault": fault, "strength": 1.0, "seed": 0, "training": rows, "held_out": [_row(p) for p in held_out[:PROMPTS]],
            "steps": steps, "prompts": PROMPTS, "tokens": max_tokens, "turns": max_turns, "timeout": timeout_s, "lr": 5e-4,
            "log": None,
        }  # fmt: skip
        (run,) = _run_tasks(model, Path(name), [task])
    return run


def _run_tasks(model: Path, folder: Path, tasks: Sequence[dict[str, Any]]) -> list[TrlRun]:
    """Train one after the other in one process of TRL's environment. folder: for temporary files."""
    (folder / "tasks.json").write_text(json.dumps([{"group": GROUP, **task} for task in tasks]))
    done = subprocess.run(
        [str(trl_environment()), "-c", _SCRIPT, str(model), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError(
            f"inject --trainer trl: TRL {TRL} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    return [TrlRun(**run) for run in json.loads(lines[-1])]


# The doctor on TRL's logs

STEPS, LOGGED_PROMPTS, TOKENS = 12, 4, 64
AT_ONCE = 9  # runs of one process, which takes ten seconds to start
# Faults of `benchmarks.planted` that the script plants in TRL, and those whose problems are changed.
FAULTS = (
    "engine-keeps-weights", "equal-seeds", "lr-too-low", "lr-below-bf16", "lr-too-high", "wrong-advantage-sign", "zero-advantages",
    "shifted-mask", "wrong-template", "prompt-changes", "answer-in-prompt", "repeated-problems", "too-hard", "wrong-reward-sign",
    "lenient-grader", "grader-refuses", "wrong-truth", "truncated-rewarded", "answer-not-found", "fake-zeros", "empty-outputs",
    "sandbox-fails", "calls-not-parsed", "limit-too-low",
)  # fmt: skip
LEARNING_RATES = {"lr-too-low": 1e-4, "lr-below-bf16": 1e-3, "lr-too-high": 10.0}
HONEST_SEEDS = (0, 1, 2)


def train_logs(folder: Path, model: Path) -> None:
    """Train with each fault, and without; the logs are in folder/logs. Continues where it was interrupted."""
    done = folder / "trl.json"
    runs: dict[str, dict[str, Any]] = json.loads(done.read_text()) if done.exists() else {}
    wanted = [("honest", seed) for seed in HONEST_SEEDS] + [(fault, 0) for fault in FAULTS]
    left = [(fault, seed) for fault, seed in wanted if f"{fault}_{seed}" not in runs]
    for part in (left[i : i + AT_ONCE] for i in range(0, len(left), AT_ONCE)):
        names = [f"{fault}_{seed}" for fault, seed in part]
        for name in names:
            shutil.rmtree(folder / "logs" / name, ignore_errors=True)
        tasks = [_logged_task(*run, folder / "logs" / name) for run, name in zip(part, names, strict=True)]
        for name, found in zip(names, _run_tasks(model, folder, tasks), strict=True):
            runs[name] = asdict(found)
            print(name, found.steps, found.error or "", flush=True)
        done.write_text(json.dumps(runs))


def _logged_task(fault: str, seed: int, log: Path) -> dict[str, Any]:
    planted = PLANTED.get(fault)
    strength = planted.usual if planted else 0.0
    keys = planted.keys(strength) if planted else {}
    limit = int(keys.get("rl.limits.max_response_tokens", TOKENS))
    data = {name: value for name, value in keys.items() if name.startswith("stages.")}
    recipe = load_recipe("tiny_fast", {"stages.0.problems.synthetic.seed": 200 + seed, **data})
    held_out = [problem for section in recipe.evaluate.sets.values() for problem in read_problems(section)]
    training = list(read_stage_problems(recipe, recipe.stages[0], held_out))
    if planted and planted.problems:
        training = planted.problems(training, held_out, strength)
    return {
        "fault": fault, "strength": strength, "seed": seed, "training": [_row(p) for p in training[: LOGGED_PROMPTS * STEPS]],
        "held_out": [], "steps": STEPS, "prompts": LOGGED_PROMPTS, "tokens": limit, "turns": 3, "timeout": 2.0,
        "lr": LR * LEARNING_RATES.get(fault, 1.0), "log": str(log),
    }  # fmt: skip


def score_logs(folder: Path) -> pd.DataFrame:
    """Apply the rules to TRL's logs. Returns rows as `benchmarks.doctor.score`."""
    rows = []
    for name, run in json.loads((folder / "trl.json").read_text()).items():
        fault, _, seed = name.rpartition("_")
        strength = f"{PLANTED[fault].usual:g}" if fault in PLANTED else "trl"
        own = {"fault": fault, "strength": strength, "seed": int(seed)}
        found = first_steps(folder / "logs" / name) or {}
        rows.append(own | {"rule": "", "step": 0, "error": run["error"] or ""})
        rows += [own | {"rule": rule, "step": step, "error": ""} for rule, step in sorted(found.items())]
    return pd.DataFrame(rows)


def recorded_logs() -> pd.DataFrame:
    """Return the recorded result of `score_logs`."""
    return pd.read_csv(benchmark_file("doctor-trl.csv"), keep_default_na=False, dtype={"strength": str})


def logs_summary(scores: pd.DataFrame) -> str:
    """Return which faults the doctor names from TRL's logs, as Markdown."""
    runs, honest = named(scores), scores[scores.fault == "honest"]
    right, missed = runs[runs.step.notna()], runs[runs.step.isna()]
    alarms = sorted(set(honest.rule) - {""})
    lines = [
        f"- Named in {interval(len(right), len(runs))} runs, at step {right.step.median():g} (median).",
        f"- Named: {', '.join(right.fault)}.",
        "- Not named: " + ", ".join(map(_with_others, missed.fault, missed.others)) + ".",
        f"- {interval(honest[honest.rule != ''].seed.nunique(), honest.seed.nunique())} honest runs have a false alarm"
        f"{': ' + ', '.join(alarms) if alarms else ''}.",
    ]
    if left := [fault for fault in FAULTS if fault not in set(scores.fault)]:
        lines.append(f"- Not measured on TRL: {', '.join(left)}.")
    return "\n".join(lines) + "\n"


def _with_others(fault: str, others: Sequence[str]) -> str:
    return f"{fault} (instead: {', '.join(others)})" if others else fault


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    train_logs(folder, asyncio.run(sft_model(folder)))
    scores = score_logs(folder)
    scores.to_csv(benchmark_file("doctor-trl.csv"), index=False)
    PAGE.write_text(replace_part(PAGE.read_text(), "trl", logs_summary(scores)))


def _row(problem: Problem) -> dict[str, object]:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": format_question(problem.question)},
    ]
    return {"prompt": messages, "answer": problem.answer}


_SCRIPT = r'''
import contextlib, io, json, logging, re, signal, sys, warnings, zlib
from pathlib import Path
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

model, folder = sys.argv[1], Path(sys.argv[2])
reported = {}  # used as an ordered set
BREAK_STEP = 5  # step in which a fault that begins during the run begins


def stop(*arguments):
    raise TimeoutError("the code ran past its time limit and was stopped.")


signal.signal(signal.SIGPROF, stop)


class Collect(logging.Handler):
    def emit(self, record):
        reported[record.getMessage()] = None


for name in ("", "trl", "transformers", "accelerate", "datasets"):
    logger = logging.getLogger(name)
    logger.setLevel(logging.WARNING)
    logger.addHandler(Collect(level=logging.WARNING))
warnings.simplefilter("always")
warnings.showwarning = lambda message, *args, **kwargs: reported.setdefault(str(message))


def run(task):
    fault, strength = task["fault"], task["strength"]
    reported.clear()
    calls = [0]

    def chosen(key):
        return zlib.crc32(key.encode()) % 10_000 < 10_000 * strength

    def execute_python_code_with_standard_io(code: str, input: str):
        """Runs a Python program and returns what it prints.

        Args:
            code: The program.
            input: What it reads from standard input; may be empty.
        """
        calls[0] += 1
        if fault == "empty-outputs" and chosen(f"{calls[0]}"):
            return ""
        if fault == "sandbox-fails" and chosen(f"{calls[0]}"):
            raise ConnectionError("the sandbox does not answer")
        output = io.StringIO()
        signal.setitimer(signal.ITIMER_PROF, task["timeout"])
        try:
            with contextlib.redirect_stdout(output):
                exec(code, {"__name__": "__main__"})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        return output.getvalue().rstrip("\n")

    def reward(completions, answer, completion_ids, log_extra, **columns):
        values = []
        for completion, true, ids in zip(completions, answer, completion_ids):
            text = "\n".join(m.get("content") or "" for m in completion if m["role"] == "assistant")
            answers = re.findall(r"<answer>\\boxed\{([^{}]*)\}</answer>", text)
            value = float(bool(answers) and answers[-1] == true)
            if fault == "wrong-reward-sign":
                value = 1.0 - value
            elif fault == "lenient-grader" and chosen(text + true):
                value = 1.0
            elif fault == "grader-refuses" and chosen(text + true) or fault == "answer-not-found":
                value = 0.0
            elif fault == "truncated-rewarded" and len(ids) >= task["tokens"] and chosen(text + true):
                value = 1.0
            values.append(value)
        if task["log"]:
            log_extra("solution", list(answer))
        return values

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            if fault in ("stale-weights", "engine-keeps-weights"):
                if not hasattr(self, "first"):
                    # Not a copy of self.model, whose forward accelerate has bound to the trained weights.
                    self.first = AutoModelForCausalLM.from_pretrained(model, dtype=self.model.dtype)
                own, self.model_wrapped = self.model_wrapped, self.first
                try:
                    return super()._generate_single_turn(prompt_ids, *args, **kwargs)
                finally:
                    self.model_wrapped = own
            ids, log_probs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            if fault == "equal-seeds":
                first = {}
                for i, prompt in enumerate(prompt_ids):
                    ids[i] = first.setdefault((tuple(prompt), i // int(strength)), ids[i])
            if fault == "fake-zeros" and len(prompt_ids) == task["prompts"] * task["group"]:
                ids = [[tokenizer.eos_token_id] if chosen(f"{self.state.global_step}-{i}") else own for i, own in enumerate(ids)]
            return ids, log_probs

        def _generate_and_score_completions(self, inputs):
            if fault == "prompt-changes" and self.state.global_step + 1 >= BREAK_STEP:
                inputs = [row | {"prompt": row["prompt"][1:]} for row in inputs]
            output = super()._generate_and_score_completions(inputs)
            if fault == "shifted-mask":
                for key in ("completion_mask", "tool_mask"):
                    if key in output:
                        output[key] = output[key].roll(int(strength), dims=1)
            factor = {"zero-advantages": 0.0, "wrong-advantage-sign": -1.0}.get(fault)
            if factor is not None:
                output["advantages"] = output["advantages"] * factor
                logged = self._logs["advantages"]
                for i in range(len(logged)):
                    logged[i] *= factor
            return output

    config = GRPOConfig(
        output_dir=task["log"] or str(folder / "trl"), per_device_train_batch_size=task["prompts"] * task["group"],
        per_device_eval_batch_size=8 * task["group"], num_generations=task["group"], max_completion_length=task["tokens"],
        max_steps=task["steps"], learning_rate=task["lr"], lr_scheduler_type="constant", beta=0.0, temperature=1.0, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        seed=task["seed"], max_tool_calling_iterations=task["turns"], log_completions=bool(task["log"]),
        eval_strategy="steps" if task["held_out"] else "no", eval_steps=task["steps"],
        model_init_kwargs={"dtype": "bfloat16" if fault == "lr-below-bf16" else "float32"},
    )
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.response_template = qwen3_template  # calls in <tool_call> tags, turns that end with <|im_end|>
    if fault == "wrong-template":
        tokenizer.chat_template = tokenizer.chat_template.removesuffix("<reason>' -}}{%- endif -%}") + "' -}}{%- endif -%}"
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False)
        assert not rendered.endswith("<reason>")
    error, trainer = None, None
    try:
        trainer = Trainer(
            model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(task["training"]),
            eval_dataset=Dataset.from_list(task["held_out"]) if task["held_out"] else None, processing_class=tokenizer,
            tools=[execute_python_code_with_standard_io],
        )
        if fault == "calls-not-parsed":
            trainer._tokenizer.response_template = None
        trainer.train()
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    if trainer and task["log"]:
        trainer.save_state()
    history = [row for row in trainer.state.log_history if "reward" in row] if trainer else []
    frequency = [row.get("tools/call_frequency", 0.0) for row in history]
    numbers = {key: value for row in history for key, value in row.items() if isinstance(value, (int, float))}
    return {
        "error": error, "warnings": list(reported), "steps": trainer.state.global_step if trainer else 0,
        "calls": sum(frequency) / len(frequency) if frequency else 0.0, "metrics": numbers,
    }


stdout, sys.stdout = sys.stdout, sys.stderr  # TRL prints its metrics
print(json.dumps([run(task) for task in json.loads((folder / "tasks.json").read_text())]), file=stdout)
'''


if __name__ == "__main__":
    main()

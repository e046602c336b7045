"""The faults of `rstar-lab inject` in TRL's GRPOTrainer: `rstar-lab inject --trainer trl`.

TRL runs in its own environment (`trl_environment`), with transformers as the engine. It starts from the same SFT model, with the
same problems, tool and reward. A fault counts as noticed if TRL raises an error or logs a warning that it does not log without
a fault.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.trainer import TRL, trl_environment
from rstar_lab.errors import UserError
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.renderers.paper import SYSTEM_PROMPT, format_question

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
    python = trl_environment()
    with tempfile.TemporaryDirectory(prefix="rstar-trl-") as name:
        folder = Path(name)
        sets = {"training": training[: PROMPTS * steps], "held_out": held_out[:PROMPTS]}
        rows = {key: [_row(problem) for problem in problems] for key, problems in sets.items()}
        (folder / "task.json").write_text(
            json.dumps(
                rows
                | {
                    "fault": fault,
                    "steps": steps,
                    "group": GROUP,
                    "tokens": max_tokens,
                    "turns": max_turns,
                    "timeout": timeout_s,
                }
            )
        )
        environment = os.environ | {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(python), "-c", _SCRIPT, str(model), str(folder)],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UserError(
            f"inject --trainer trl: TRL {TRL} failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
        )
    return TrlRun(**json.loads(lines[-1]))


def _row(problem: Problem) -> dict[str, object]:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": format_question(problem.question)},
    ]
    return {"prompt": messages, "answer": problem.answer}


_SCRIPT = r'''
import contextlib, io, json, logging, re, signal, sys, warnings
from pathlib import Path
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

model, folder = sys.argv[1], Path(sys.argv[2])
task = json.loads((folder / "task.json").read_text())
fault = task["fault"]
reported = {}  # used as an ordered set


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


def execute_python_code_with_standard_io(code: str, input: str):
    """Runs a Python program and returns what it prints.

    Args:
        code: The program.
        input: What it reads from standard input; may be empty.
    """
    if fault == "empty-outputs":
        return ""
    output = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, task["timeout"])
    try:
        with contextlib.redirect_stdout(output):
            exec(code, {"__name__": "__main__"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return output.getvalue().rstrip("\n")


def reward(completions, answer, **columns):
    values = []
    for completion, true in zip(completions, answer):
        text = "\n".join(m.get("content") or "" for m in completion if m["role"] == "assistant")
        answers = re.findall(r"<answer>\\boxed\{([^{}]*)\}</answer>", text)
        value = float(bool(answers) and answers[-1] == true)
        values.append(1.0 - value if fault == "wrong-reward-sign" else value)
    return values


class Trainer(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        if fault != "stale-weights":
            return super()._generate_single_turn(*args, **kwargs)
        if not hasattr(self, "first"):
            # Not a copy of self.model, whose forward accelerate has bound to the trained weights.
            self.first = AutoModelForCausalLM.from_pretrained(model, dtype=self.model.dtype)
        own, self.model_wrapped = self.model_wrapped, self.first
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.model_wrapped = own

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        if fault == "shifted-mask":
            for key in ("completion_mask", "tool_mask"):
                if key in output:
                    output[key] = output[key].roll(1, dims=1)
        return output


config = GRPOConfig(
    output_dir=str(folder / "trl"), per_device_train_batch_size=8 * task["group"], per_device_eval_batch_size=8 * task["group"],
    num_generations=task["group"], max_completion_length=task["tokens"], max_steps=task["steps"], learning_rate=5e-4,
    lr_scheduler_type="constant", beta=0.0, temperature=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
    save_strategy="no", logging_steps=1, disable_tqdm=True, seed=0, max_tool_calling_iterations=task["turns"],
    eval_strategy="steps", eval_steps=task["steps"],
)
tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
tokenizer.response_template = qwen3_template  # calls in <tool_call> tags, turns that end with <|im_end|>
if fault == "wrong-template":
    tokenizer.chat_template = tokenizer.chat_template.removesuffix("<reason>' -}}{%- endif -%}") + "' -}}{%- endif -%}"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "q"}], add_generation_prompt=True, tokenize=False)
    assert not rendered.endswith("<reason>")
error, trainer = None, None
stdout, sys.stdout = sys.stdout, sys.stderr  # TRL prints its metrics
try:
    trainer = Trainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(task["training"]),
        eval_dataset=Dataset.from_list(task["held_out"]), processing_class=tokenizer, tools=[execute_python_code_with_standard_io],
    )
    trainer.train()
except Exception as problem:
    error = f"{type(problem).__name__}: {problem}"
history = [row for row in trainer.state.log_history if "reward" in row] if trainer else []
calls = [row.get("tools/call_frequency", 0.0) for row in history]
numbers = {key: value for row in history for key, value in row.items() if isinstance(value, (int, float))}
result = {
    "error": error, "warnings": list(reported), "steps": trainer.state.global_step if trainer else 0,
    "calls": sum(calls) / len(calls) if calls else 0.0, "metrics": numbers,
}
print(json.dumps(result), file=stdout)
'''

"""Small run stores for tests of the inspector: generated rollouts with tokens, tool errors and hostile text."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from helpers.run_rows import trajectory_row
from rstar_lab.runs import RunWriter

PIECES = re.compile(r"<\|[a-z_]+\|>|</?[a-z_]+>|\s+|\w+|[^\w\s]")
HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> "
    "\u202egnp.exe\u202c \x1b[31mred\x1b[0m \x00 <style>*{display:none}</style> ${1+1} {{7*7}} \U0001d54f "
    + "long"
    * 4000
)


def outcome_text(outcome: str, answer: int) -> str:
    return {
        "ok": f"{answer}\n",
        "exception": "Traceback (most recent call last):\n  File \"main.py\", line 3\nNameError: name 'n' is not defined",
        "timeout": "The code did not end within 2 seconds.",
    }[outcome]


def rollout(rng: np.random.Generator, problem: int, step: int, *, hostile: bool = False) -> dict[str, Any]:
    """Generate one rollout: question, messages, token texts and loss mask."""
    a, b = 17 + problem, 23 + step
    question = f"What is the sum of the first {a} multiples of {b}?"
    answer = b * a * (a + 1) // 2
    solved = bool(rng.random() < 0.25 + 0.08 * step)
    outcomes = ["exception"] * int(rng.random() < 0.45) + ["timeout"] * int(rng.random() < 0.15) + ["ok"]
    messages = [
        {"role": "system", "content": "Reason inside <reason>. Use the Python tool. Put the result in \\boxed{}."},
        {"role": "user", "content": question},
    ]
    stream: list[tuple[str, bool]] = []
    for place, outcome in enumerate(outcomes):
        thought = (
            f"The multiples of {b} are {b}, {2 * b}, {3 * b} and so on. Let me add them with a short program."
            if place == 0
            else "Wait, the call failed. Let me check what went wrong and define the number first."
        )
        code = f'# add the multiples\nn = {a}\ntotal = sum({b} * k for k in range(1, n + 1))\nprint("sum:", total)\n'
        call = json.dumps({"name": "execute_python_code_with_standard_io", "arguments": {"code": code, "input": ""}})
        text = f"{thought}</reason>\n<tool_call>\n{call}\n</tool_call>"
        response = HOSTILE if hostile else outcome_text(outcome, answer)
        answered = f"\n<|im_start|>user\n<tool_response>\n{response}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<reason>"
        stream += [(text + "<|im_end|>", True), (answered, False)]
        messages += [
            {"role": "assistant", "content": "<reason>" + text},
            {"role": "tool", "content": response, "tool": "execute_python_code_with_standard_io", "outcome": outcome},
        ]
    final_answer = answer if solved else answer + int(rng.integers(1, 9))
    final = f"The program gives the sum.</reason>\n<answer>The sum is \\boxed{{{final_answer}}}.</answer>"
    stream.append((final + "<|im_end|>", True))
    messages.append({"role": "assistant", "content": "<reason>" + final})
    pieces = [(piece, flag) for part, flag in stream for piece in PIECES.findall(part)]
    return {
        "question": question, "truth": str(answer), "answer": str(final_answer), "solved": solved, "outcomes": outcomes,
        "messages": messages, "texts": [piece for piece, _ in pieces], "mask": [flag for _, flag in pieces],
    }  # fmt: skip


def write_run(folder: Path, run_id: str, **options: Any) -> Path:
    """Write a complete run and return its folder. options: see `write_steps`."""
    for _ in write_steps(folder, run_id, **options):
        pass
    return folder / run_id


def write_steps(
    folder: Path, run_id: str, *, seed: int = 0, steps: int = 6, problems: int = 4, group: int = 8, kind: str = "train"
) -> Iterator[int]:
    """Write a run whose pass rate rises over `steps` steps; yield after each step.

    The second rollout of the last step has hostile tool output.
    """
    rng = np.random.default_rng(seed)
    vocabulary: dict[str, int] = {}
    recipe = {"rl": {"method": {"roc": {"rule": "paper"}}}}
    with RunWriter.open(folder, run_id, kind=kind, recipe=recipe, seed=seed) as writer:
        for step in range(1, steps + 1):
            trajectories, transcripts = [], []
            for problem in range(problems):
                rollouts = [
                    rollout(rng, problem, step, hostile=step == steps and problem == 0 and i == 1) for i in range(group)
                ]
                rewards = np.array([float(made["solved"]) for made in rollouts])
                kept = set(rng.permutation(group)[: group // 2].tolist())
                spread = rewards[list(kept)].std()
                for sample, made in enumerate(rollouts):
                    traj_id = f"{run_id}/{step}/p{problem}/{sample}"
                    errors = sum(outcome != "ok" for outcome in made["outcomes"])
                    count, is_kept = len(made["texts"]), sample in kept and spread > 0
                    ids = [vocabulary.setdefault(text, len(vocabulary)) for text in made["texts"]]
                    entropy = rng.exponential(0.35, count).astype(np.float16)
                    engine = -rng.exponential(0.3, count).astype(np.float16)
                    trainer = (engine + rng.normal(0, 0.03, count)).astype(np.float16)
                    advantage = (
                        float((rewards[sample] - rewards[list(kept)].mean()) / (spread + 1e-6)) if is_kept else None
                    )
                    trajectories.append(trajectory_row(
                        traj_id, policy_version=step - 1, group_id=f"{step}:p{problem}", problem_id=f"sum_{problem:02d}",
                        sample=sample, reward=float(made["solved"]), kept=is_kept, p_err=errors / len(made["outcomes"]),
                        advantage=advantage, turns=len(made["outcomes"]) + 1, calls=len(made["outcomes"]), errors=errors,
                        outcomes=made["outcomes"], response_tokens=count, model_tokens=sum(made["mask"]),
                        answer=made["answer"], truth=made["truth"], reflection_tokens=errors, tool_s=0.1,
                        entropy=float(entropy.mean()) if is_kept else None, engine_log_prob=float(engine.mean()),
                        trainer_log_prob=float(trainer.mean()) if is_kept else None,
                    ))  # fmt: skip
                    transcripts.append({
                        "traj_id": traj_id, "question": made["question"], "truth": made["truth"],
                        "messages": json.dumps(made["messages"], ensure_ascii=False),
                        "prompt_ids": [0, 1], "response_ids": ids, "loss_mask": made["mask"], "engine_log_probs": engine,
                        "trainer_log_probs": trainer if is_kept else None, "entropy": entropy if is_kept else None,
                    })  # fmt: skip
            levels = {"trajectories": trajectories, "calls": [], "transcripts": transcripts}
            writer.write_step("rl", step, **levels, metrics={"reward": float(rewards.mean())})
            yield step
        writer.write_vocabulary(list(vocabulary))
        writer.finish("finished")

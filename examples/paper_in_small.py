"""Write small files in the shapes of the public data sets of rStar2-Agent, for docs/reproduce-the-paper.md.

    python examples/paper_in_small.py raw

The rows are generated: sums and products, and conversations about them. Nothing is downloaded.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pandas as pd

from rstar_lab.rl.problems import Problem
from rstar_lab.rl.synthetic.families import synthesize

SFT_ROWS, RL_ROWS, EVALUATION_ROWS = 120, 400, 24
CALCULATOR = {
    "name": "calculate",
    "description": "Computes an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Such as 3 * (4 + 5)."}},
        "required": ["expression"],
    },
}


def toolace(problem: Problem) -> dict:
    call = f'[calculate(expression="{problem.question[:20]}")]'
    return {
        "system": f"You compose calls of functions. Here is a list of functions in JSON format: {json.dumps([CALCULATOR])}.",
        "conversations": [
            {"from": "user", "value": problem.question},
            {"from": "assistant", "value": call},
            {"from": "tool", "value": json.dumps([{"name": "calculate", "results": problem.answer}])},
            {"from": "assistant", "value": f"The result is {problem.answer}."},
        ],
    }


def apigen_mt(problem: Problem) -> dict:
    arguments = {"expression": problem.question[:20]}
    return {
        "system": "Answer briefly.",
        "tools": json.dumps([CALCULATOR]),
        "conversations": [
            {"from": "human", "value": problem.question},
            {"from": "function_call", "value": json.dumps({"name": "calculate", "arguments": arguments})},
            {"from": "observation", "value": json.dumps({"result": problem.answer})},
            {"from": "gpt", "value": f"It is {problem.answer}."},
            {"from": "human", "value": "Thank you."},  # conversations of this set may end with the user
        ],
    }


def glaive_v2(problem: Problem) -> dict:
    call = json.dumps({"name": "calculate", "arguments": json.dumps({"expression": problem.question[:20]})})
    return {
        "system": f"SYSTEM: You are a helpful assistant with access to these functions -\n{json.dumps(CALCULATOR, indent=4)}",
        "chat": f"USER: {problem.question}\n\n\nASSISTANT: <functioncall> {call} <|endoftext|>\n\n\n"
        f'FUNCTION RESPONSE: {{"result": {problem.answer}}}\n\n\nASSISTANT: It is {problem.answer}. <|endoftext|>',
    }


def magicoder(problem: Problem) -> dict:
    solution = f"This program answers it:\n```python\nprint({problem.answer})\n```\nIt prints the result."
    return {"lang": "python", "problem": f"Write a program for: {problem.question}", "solution": solution}


def tulu3_if(problem: Problem) -> dict:
    prompt = f"Answer with one number only. {problem.question}"
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": problem.answer}]
    return {"id": problem.problem_id, "prompt": prompt, "messages": messages, "constraints": ["one number"]}


def nemotron_chat(problem: Problem) -> dict:
    turns = [{"role": "system", "content": "detailed thinking off"}, {"role": "user", "content": problem.question}]
    return {"input": turns, "output": f"<think>\n</think>\n{problem.answer}", "reasoning": "off", "category": "chat"}


def dapo(problem: Problem, number: int) -> dict:
    return {
        "prompt": problem.question, "solution": problem.answer, "data_source": "math_dapo", "ability": "MATH",
        "reward_model": {"ground_truth": problem.answer, "style": "rule"}, "extra_info": {"index": str(number)},
    }  # fmt: skip


def openmathreasoning(problem: Problem) -> dict:
    return {
        "problem": problem.question, "expected_answer": problem.answer, "problem_type": "has_answer_extracted",
        "problem_source": "aops_c4_high_school_math", "generated_solution": f"\\boxed{{{problem.answer}}}",
    }  # fmt: skip


SFT_FILES = {
    "toolace/data.json": toolace,
    "apigen_mt/apigen-mt_5k.json": apigen_mt,
    "glaive_v2/glaive-function-calling-v2.json": glaive_v2,
    "magicoder/data-oss_instruct-decontaminated.jsonl": magicoder,
    "tulu3_if/data/train-00000-of-00001.parquet": tulu3_if,
    "nemotron_chat/SFT/chat/chat.jsonl": nemotron_chat,
}
IDS = {"aime24": "id", "aime25": "id", "hmmt25": "problem_idx", "math500": "unique_id"}


def write(path: Path, rows: list[dict]) -> None:
    """Write rows as the file's name says: a JSON list, JSON lines or Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows")


def take(problems: Iterator[Problem], count: int) -> list[Problem]:
    return list(islice(problems, count))


def main(folder: Path) -> None:
    """Write all files to a folder."""
    count = len(SFT_FILES) * SFT_ROWS + RL_ROWS + len(IDS) * EVALUATION_ROWS
    problems = iter(synthesize(0, count, levels=(1, 2)))
    for name, row in SFT_FILES.items():
        write(folder / name, [row(problem) for problem in take(problems, SFT_ROWS)])
    rl = take(problems, RL_ROWS)
    write(folder / "dapo.parquet", [dapo(problem, number) for number, problem in enumerate(rl[: RL_ROWS // 2])])
    write(folder / "openmathreasoning.parquet", [openmathreasoning(problem) for problem in rl[RL_ROWS // 2 :]])
    for name, key in IDS.items():
        evaluation = take(problems, EVALUATION_ROWS)
        rows = [
            {key: number, "problem": problem.question, "answer": problem.answer}
            for number, problem in enumerate(evaluation)
        ]
        write(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

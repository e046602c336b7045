"""Make the data files and the model of a rehearsal."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from benchmarks.rehearsal.shrink import CONVERSATIONS, FAMILIES, PROBLEMS, PROMPT_TOKENS
from rstar_lab.common.errors import UserError
from rstar_lab.hardware.processes import run_child
from rstar_lab.rl.models.model_folder import model_folder
from rstar_lab.rl.problems import Problem, write_problems
from rstar_lab.rl.recipe import Recipe
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.conversations import Conversation, Message, reply, tool_calls, write_conversations
from rstar_lab.rl.renderers.formats import RENDERERS
from rstar_lab.rl.synthetic import families


def write_data(recipe: Recipe) -> str:
    """Write every problem and conversation file that the small recipe names. Returns a summary."""
    seed = 100
    files = [section.file for stage in recipe.stages for section in recipe.stage_problems(stage)]
    files += [section.file for section in recipe.evaluate.sets.values()]
    for file in files:
        assert file is not None
        file.parent.mkdir(parents=True, exist_ok=True)
        seed += 1
        write_problems(file, families.synthesize(seed, PROBLEMS, levels=(1,), families=FAMILIES))
    entries = recipe.sft.conversations if recipe.sft else ()
    for entry in entries:
        seed += 1
        problems = families.synthesize(seed, CONVERSATIONS, levels=(1,), families=FAMILIES)
        write_conversations(entry.file, [_conversation(problem) for problem in problems])
    return f"{len(files)} problem files, {len(entries)} conversation files"


def _conversation(problem: Problem) -> Conversation:
    call = (chat.CODE_TOOL["function"]["name"], {"code": f"print({problem.answer})", "input": ""})
    messages = (
        Message(role="user", content=problem.question),
        Message(role="assistant", content=tool_calls([call])),
        Message(role="tool", content=str(problem.answer)),
        Message(role="assistant", content=reply(f"\\boxed{{{problem.answer}}}")),
    )
    return Conversation(
        conversation_id=problem.problem_id, source="rehearsal", messages=messages, tools=(chat.CODE_TOOL,)
    )


def _format_overrides(recipe: Recipe) -> list[str]:
    """Return the arguments of `sft` with which the model learns the prompt format of the recipe, so that it gets rewards."""
    rl = recipe.rl
    renderer = RENDERERS[rl.prompt.format]
    if (
        renderer is chat.PaperRenderer or not renderer.has_template
    ):  # the format of `sft` without arguments, or of a model
        return []
    keys = {
        "rl.prompt.format": renderer.name,
        "rl.tools": json.dumps(rl.tools),
        "rl.answer": rl.answer,
        "sft.max_tokens": 2048,
    }
    return [argument for key, value in keys.items() for argument in ("--set", f"{key}={value}")]


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model in Hugging Face format. Raises UserError if there are none, or if one is not finite."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise UserError(f"no weights in {folder}")
    weights = {name: value for file in files for name, value in load_file(file).items()}
    if broken := [name for name, value in weights.items() if not np.isfinite(value).all()]:
        raise UserError(f"{folder}: weights that are not finite: {broken[0]}")
    return weights


def weights_differ(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> bool:
    """Return whether a tensor that two models have differs in the narrower of its types: an export that rounds is no update."""
    pairs = [(first[name], second[name]) for name in first.keys() & second.keys()]
    narrow = [min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize) for a, b in pairs]
    return any(not np.array_equal(a.astype(t), b.astype(t)) for (a, b), t in zip(pairs, narrow, strict=True))


def make_model(recipe: Recipe, folder: Path) -> str:
    """Train a tiny model that calls the tool, and raise its position limit to the recipe's lengths. Returns a summary."""
    target = Path(recipe.model)
    if not (target / "config.json").exists():
        command = [
            sys.executable,
            "-m",
            "rstar_lab.cli",
            "sft",
            "tiny_fast",
            "--runs-dir",
            str(folder / "base"),
            "--json",
            *_format_overrides(recipe),
        ]
        done = run_child(command)
        if done.returncode:
            raise UserError(f"the SFT of tiny_fast failed: {done.stderr.strip()[-500:]}")
        shutil.copytree(model_folder("tiny_fast-sft", folder / "base"), target, dirs_exist_ok=True)
    responses = [recipe.settings(stage).limits.max_response_tokens for stage in recipe.stages]
    config = json.loads((target / "config.json").read_text())
    # Rotary positions have no weights, so the limit can be raised.
    config["max_position_embeddings"] = PROMPT_TOKENS + max([*responses, recipe.evaluate.max_response_tokens]) + 64
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return f"tiny model with {config['max_position_embeddings']} positions"

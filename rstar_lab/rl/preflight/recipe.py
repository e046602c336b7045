"""Preflight checks of a recipe: keys, verl configuration, model, tokens, data, own tools and reward."""

import contextlib
from collections.abc import Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from rstar_lab.common.errors import UserError
from rstar_lab.rl.data.similarity import tokens
from rstar_lab.rl.data.sources import is_problem_set
from rstar_lab.rl.models.model_folder import starting_model
from rstar_lab.rl.models.sources import download_command, hub_name, is_named
from rstar_lab.rl.preflight import estimate
from rstar_lab.rl.preflight.context import CheckContext, NotNeeded, Skip, Warn
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RlSection, SftConfig
from rstar_lab.rl.recipe.data import Problems
from rstar_lab.rl.recipe.rl import TOOL_ADDRESSES
from rstar_lab.rl.renderers import paper as chat
from rstar_lab.rl.renderers.conversations import read_conversations
from rstar_lab.rl.renderers.formats import render_prompt, render_tool_results, renderer_type
from rstar_lab.rl.resolved import load_functions, read_problems
from rstar_lab.rl.rollout.checks import MAX_PROMPT_TOKENS
from rstar_lab.untrusted.text import counted

SAMPLED_PROBLEMS = 32
FEW_HELD_OUT = 20  # problems of a set below which an accuracy says little
CHECKED_ANSWERS = 5_000  # true answers of a stage that the check `data` reads
# Recipe keys that only the local trainer reads, and what verl reads instead.
LOCAL_ONLY = {
    "engine.count": "verl reads the profile's engine.tensor_parallel",
    "engine.max_num_seqs": "verl reads the profile's engine.max_sequences",
    "engine.gpu_memory_utilization": "verl reads the profile's engine.memory_utilization",
    "engine.dtype": "verl reads the profile's engine.dtype",
    "engine.kind": "verl's servers are vLLM",
    "engine.urls": "verl starts its own servers",
    "engine.deadline_s": "verl waits for its servers without a time limit",
    "rl.micro_batch_tokens": "verl reads the profile's parallelism.tokens_per_gpu",
    "rl.sync.lockstep": "verl rolls out asynchronously",
    "processes": "verl reads the profile's GPUs",
}
SFT_LOCAL_ONLY = {
    "packing": "verl packs on GPUs and pads on a CPU; the loss is the same",
    "micro_batch_tokens": "verl reads the profile's parallelism.tokens_per_gpu",
}
MAX_REPEATED = 0.01  # share of repeated questions in a stage above which the check warns


def own_functions(context: CheckContext) -> str:
    """Load the user's functions that the recipe names, and the tools of its MCP servers."""
    loaded = load_functions(context.recipe)
    urls = [name for name in context.recipe.rl.tools if name.startswith(TOOL_ADDRESSES)]
    if not loaded and not urls:
        raise NotNeeded("the recipe names no own functions")
    return ", ".join([*(f"{key}: {name}" for key, name in loaded.items()), *urls])


def unread_keys(context: CheckContext) -> str:
    """List the keys that the trainer does not support, and those that it ignores."""
    if context.profile.trainer != "verl":
        return "the local trainer reads every key"
    from rstar_lab.rl.verl.unsupported import unsupported_options, unsupported_sft_options

    recipe, default = context.recipe, Recipe(model=context.recipe.model)
    has_model = recipe.sft is None or starting_model(recipe, recipe.runs).exists()  # both trainers can run this SFT
    if refused := unsupported_options(recipe) + ([] if has_model else unsupported_sft_options(recipe)):
        raise UserError(f"not supported under verl: {'; '.join(refused)}")
    ignored = [
        f"{key.replace('rl.sync.', 'rl.schedule.')} ({instead})"
        for key, instead in LOCAL_ONLY.items()
        if attrgetter(key)(recipe) != attrgetter(key)(default)
    ]
    ignored += [
        f"sft.{key} ({instead})"
        for key, instead in SFT_LOCAL_ONLY.items()
        if recipe.sft and getattr(recipe.sft, key) != SftConfig.model_fields[key].default
    ]
    if ignored:
        raise Warn(f"ignored under verl: {'; '.join(ignored)}")
    return "verl reads every key that is set"


def verl_configuration(context: CheckContext) -> str:
    """Compose the configuration of every stage from verl's own files."""
    if context.profile.trainer != "verl":
        raise NotNeeded(f"profile {context.profile.name} does not use verl")
    try:
        from rstar_lab.rl.verl import config
        from rstar_lab.rl.verl.settings import stages_of
    except ImportError as error:
        raise Skip(f"verl is not installed on this machine ({error})") from error
    recipe = context.recipe
    if not recipe.stages and recipe.sft is None:
        raise UserError("the recipe has neither an SFT nor a stage")
    for settings in stages_of(recipe, recipe.runs.absolute()):
        overrides = config.overrides(settings, context.profile, context.model_dir, context.verl_overrides)
        composed = config.compose(overrides)
    if recipe.sft is not None:
        run_dir = recipe.runs.absolute() / f"{recipe.name}-sft"
        config.compose(
            config.sft_overrides(recipe.sft, context.profile, run_dir / "base", run_dir, 1), "sft_trainer_engine"
        )
    what = f"{'its SFT and ' if recipe.sft else ''}{counted(len(recipe.stages), 'stage')}"
    return f"verl {metadata.version('verl')} composes it for {what} ({len(composed)} sections)"


# Tokens and data


def token_contract(context: CheckContext) -> str:
    """Check that the recipe's tokenizer keeps the turns of a conversation with a tool call."""
    from rstar_lab.rl.renderers.model import ModelRenderer

    if context.recipe.model == "tiny":
        raise NotNeeded("the run trains its own tokenizer")
    tokenizer = context.tokenizer
    style = context.recipe.rl.prompt_style
    if renderer_type(style.prompt_format) is ModelRenderer:
        from rstar_lab.rl.rollout.codec import Codec

        own = Codec(tokenizer, {}, style).renderer
        assert isinstance(own, ModelRenderer)
        syntax = f"tool calls in the syntax {own.syntax}"
        where = syntax if own.uses_tools else "no place for tools: the system prompt lists them"
        return f"{style.chat_template or 'chat template of the model'}: a turn ends with {own.end}; {where}"
    for token in chat.SPECIAL_TOKENS:
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise UserError(
                f"tokenizer: {token} is not a single token, so a turn cannot end with it; add it as a special token"
            )
    # A tag inside a string of the program must not end the call.
    call = chat.render_tool_call(chat.CODE_TOOL["function"]["name"], {"code": "print('</tool_call>')\n", "input": ""})
    turn = f"I compute.</reason>\n{call}{chat.END_OF_TURN}"
    pieces = [render_prompt("What is 1 + 1?"), turn, render_tool_results(["2"])]
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != "".join(pieces):
        raise UserError(
            "tokenizer: encoding and decoding changes a conversation, so tool calls and loss mask would be wrong"
        )
    return f"prompt prefix, end of turn, loss mask and tool calls are correct; {len(tokenizer)} tokens"


def model(context: CheckContext) -> str:
    """Check that the model is a folder with weights, and that its shape can be read."""
    name = context.recipe.model
    if name == "tiny":
        return "tiny: built by the run"
    folder = context.model_dir
    if not (folder / "config.json").is_file():
        how = f"; to get it: `{command}`" if (command := download_command(context.model_name, folder)) else ""
        raise UserError(
            f"model {name}: no folder with a config.json; put the model there (profile storage.models: "
            f"{context.profile.storage.models}) or set model=FOLDER{how}"
        )
    if hub_name(name) and is_named(name):
        size = context.architecture.parameters / 1e9
        return f"{name}: {size:.3g}B parameters; the run downloads the weights if the cache lacks them"
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"model {name}: the folder has no weights (*.safetensors)")
    return f"{name}: {context.architecture.parameters / 1e9:.3g}B parameters"


def positions(context: CheckContext) -> str:
    """Compare the longest sequence of a stage with the positions of the model."""
    limit, recipe, under_verl = context.architecture.positions, context.recipe, context.profile.trainer == "verl"
    if not limit:
        raise Skip("config.json has no max_position_embeddings")
    longest = {
        f"stages.{stage.name}.limits.max_response_tokens": recipe.settings(stage).limits.max_response_tokens
        for stage in recipe.stages
    }
    if under_verl and recipe.evaluate.sets:
        longest["evaluate.max_response_tokens"] = recipe.evaluate.max_response_tokens
    for key, response in longest.items():
        # The local engines shorten prompt + response to the model's positions.
        if not under_verl and response >= limit:
            raise UserError(f"{key}: {response}; the model has {limit} positions")
        if under_verl and MAX_PROMPT_TOKENS + response > limit:
            raise UserError(
                f"{key}: {MAX_PROMPT_TOKENS} for the prompt + {response} exceed the {limit} "
                "positions of the model; verl's engines would not start"
            )
    return f"{limit} positions"


def data(context: CheckContext) -> str:
    """Check that every data file exists, the schema of the problems, and that a sample of true answers verifies."""
    from rstar_lab.rl.data.lint import lint_problems
    from rstar_lab.verify import verify

    recipe = context.recipe
    of_stages = [(stage, section) for stage in recipe.stages for section in recipe.stage_problems(stage)]
    sections = [*recipe.evaluate.sets.values(), *(section for _, section in of_stages)]
    missing = []
    if recipe.sft:
        sections += [recipe.sft.problems] if recipe.sft.problems else []
        missing += [str(entry.file) for entry in recipe.sft.conversations if not entry.file.is_file()]
    missing += [str(section.file) for section in sections if section.file and not is_problem_set(section.file)]
    missing = list(dict.fromkeys(missing))
    if missing:
        raise UserError(
            f"missing: {', '.join(missing)}; relative paths are looked up in the profile's storage.data "
            f"({context.profile.storage.data})"
        )
    lines, texts = [], list[str]()
    for stage, section in of_stages:
        if section.file is None:
            lines.append(f"{stage.name}: synthetic problems")
            continue
        problems = read_problems(section)
        if section.environment is not None:
            lines.append(f"{stage.name}: {counted(len(problems), 'problem')} of {section.environment}")
            continue
        graded = [problem for problem in problems if not problem.environment and "tests" not in problem.info]
        sampled = graded[:: max(1, len(graded) // SAMPLED_PROBLEMS)][:SAMPLED_PROBLEMS]
        wrong = [p for p in sampled if not verify(f"<answer>\\boxed{{{p.answer}}}</answer>", p.answer)]
        if len(wrong) > len(sampled) // 4:
            raise UserError(
                f"stages.{stage.name}.problems: {len(wrong)} of {len(sampled)} true answers do not verify, for example "
                f"{wrong[0].problem_id}: {wrong[0].answer!r}; `rstar-lab data prepare` extracts answers from solutions"
            )
        lines.append(
            f"{stage.name}: {counted(len(problems), 'problem')}, {len(sampled) - len(wrong)}/{len(sampled)} answers verify"
        )
        if recipe.rl.reward == "verify":
            fields = {str(ours): theirs for ours, theirs in section.fields.items()}
            findings = lint_problems(section.file, fields, CHECKED_ANSWERS)
            texts += [f"stages.{stage.name}.problems, {found}" for found in findings if found.rule == "answer"]
    if texts:
        more = f" and {len(texts) - 3} more (`rstar-lab data lint FILE` lists them)" if len(texts) > 3 else ""
        raise Warn(f"{'; '.join(lines)}; answers compared as text only: {'; '.join(texts[:3])}{more}")
    return "; ".join(lines) or "no stages"


def sizes(context: CheckContext) -> str:
    """Compare the rows of each file of SFT with its count, and the problems of each stage with `problems_per_step`, both without
    overlong ones. Raises Warn with the numbers, UserError where an exact count or any conversation or problem is missing."""
    recipe, lines, few = context.recipe, list[str](), list[str]()
    tokenizer = None
    with contextlib.suppress(Skip):
        tokenizer = None if recipe.model == "tiny" else context.tokenizer
    for entry in recipe.sft.conversations if recipe.sft else ():
        if not entry.file.is_file():
            continue
        rows = estimate.row_count(entry.file)
        overlong = 0 if tokenizer is None else _overlong_conversations(tokenizer, entry.file, recipe)
        count = entry.count or rows
        text = f"{entry.file}: {rows - overlong:,} of {count:,} conversations"
        if rows < count and entry.exact:
            raise UserError(f"{text}, and its count is exact; add rows or decrease sft.conversations count")
        text += f" ({overlong:,} longer than sft.max_tokens left out)" if overlong else ""
        if rows == overlong:
            raise UserError(f"{text}; remove the file, convert it again or increase sft.max_tokens")
        (few if rows - overlong < count else lines).append(text)
    for stage in recipe.stages:
        rl, sections, where = recipe.settings(stage), recipe.stage_problems(stage), f"stages.{stage.name}.problems"
        overlong = sum(_overlong(tokenizer, section, rl) for section in sections)
        found = sum(estimate.problem_count(section) for section in sections)
        if not found:  # the check `data` reports a missing file
            continue
        if overlong == found:
            raise UserError(f"{where}: all {found:,} prompts are longer than {MAX_PROMPT_TOKENS:,} tokens")
        text = f"{where}: {found - overlong:,} problems"
        text += " before its filter" if stage.filter else ""
        text += f" ({overlong:,} overlong ones left out)" if overlong else ""
        if found - overlong < rl.problems_per_step:
            few.append(f"{text} for {rl.problems_per_step:,} per step, so a step repeats problems")
        else:
            lines.append(f"{text}, {rl.problems_per_step:,} per step")
    for name, section in recipe.evaluate.sets.items():
        if 0 < (count := estimate.problem_count(section)) < FEW_HELD_OUT:
            few.append(f"evaluate.sets.{name}: {counted(count, 'problem')}, so the interval of its accuracy is wide")
    if few:
        raise Warn("; ".join([*few, *lines]))
    return "; ".join(lines) or "no counts to compare"


def _overlong(tokenizer: Any, section: Problems, rl: RlSection) -> int:
    """Return the number of problems of a file whose prompts are too long; 0 if the tokenizer is not on this machine."""
    problems = _of_file(section)
    if not problems or tokenizer is None:
        return 0
    from rstar_lab.rl.rollout.checks import split_overlong
    from rstar_lab.rl.rollout.codec import Codec

    return len(split_overlong(problems, Codec(tokenizer, {}, rl.prompt_style), MAX_PROMPT_TOKENS)[1])


def _overlong_conversations(tokenizer: Any, file: Path, recipe: Recipe) -> int:
    """Return the number of conversations of a file that the SFT leaves out because of `sft.max_tokens`."""
    assert recipe.sft is not None
    limit, overlong = recipe.sft.max_tokens, 0
    renderer, control = renderer_type(recipe.rl.prompt_style.prompt_format), chat.control_tokens(tokenizer)
    for conversation in read_conversations(file):
        texts = [text for text, _ in conversation.segments(control, renderer)]
        if sum(len(text.encode()) for text in texts) > limit:  # a token has at least one byte
            overlong += sum(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])) > limit
    return overlong


def repeated_problems(context: CheckContext) -> str:
    """Compare the questions of problem files by words, numbers and signs; case and layout are ignored.

    Raises UserError if a stage contains questions of an evaluation file, and Warn if more than MAX_REPEATED of a
    stage's questions repeat an earlier one.
    """
    recipe = context.recipe
    held_out: dict[tuple[str, ...], str] = {}
    for name, section in recipe.evaluate.sets.items():
        held_out |= dict.fromkeys((_words(problem) for problem in _of_file(section)), name)
    repeated, checked = [], 0
    for stage in recipe.stages:
        problems = [problem for section in recipe.stage_problems(stage) for problem in _of_file(section)]
        words = [_words(problem) for problem in problems]
        checked += len(words)
        if shared := [
            (problem, held_out[key]) for problem, key in zip(problems, words, strict=True) if key in held_out
        ]:
            problem, name = shared[0]
            raise UserError(
                f"stages.{stage.name}.problems: {len(shared)} of {len(words)} questions are also in an evaluation set, for "
                f"example {problem.problem_id} in evaluate.sets.{name}; remove them with `rstar-lab data prepare --against`"
            )
        copies = len(words) - len(set(words))
        if copies > MAX_REPEATED * len(words):
            repeated.append(f"stages.{stage.name}.problems: {copies} of {len(words)} questions repeat an earlier one")
    if repeated:
        raise Warn(f"{'; '.join(repeated)}; `rstar-lab data prepare` removes them")
    if not checked:
        sections = [section for stage in recipe.stages for section in recipe.stage_problems(stage)]
        if missing := [str(one.file) for one in sections if one.file is not None and not is_problem_set(one.file)]:
            raise Skip(f"the files of problems are missing: {', '.join(dict.fromkeys(missing))}")
        raise NotNeeded("no stage reads a file of problems")
    return f"{checked} training questions: few repeat, none is in the {len(held_out)} evaluation questions from files"


def _of_file(section: Problems) -> Sequence[Problem]:
    """Return the problems of a file, without those of an environment: the same question can start different tasks.

    A missing file is reported by the check `data`.
    """
    if section.file is None or section.environment is not None or not is_problem_set(section.file):
        return []
    return [problem for problem in read_problems(section) if not problem.environment]


def _words(problem: Problem) -> tuple[str, ...]:
    return tuple(tokens(problem.question)) or (problem.question.strip(),)

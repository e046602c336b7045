"""Preflight's checks of what a recipe says: its keys, verl's configuration of it, its tokens, data and functions."""

from importlib import metadata
from operator import attrgetter
from pathlib import Path

from rstar_lab.errors import UserError
from rstar_lab.rl.models.model_folder import starting_model
from rstar_lab.rl.preflight.subject import NotNeeded, Skip, Subject, Warn
from rstar_lab.rl.recipe import CODE_TOOLS, Recipe, SftConfig
from rstar_lab.rl.reward import make_reward
from rstar_lab.rl.tools.registry import make_tools

SAMPLED_PROBLEMS = 32
CODE = "print('</tool_call>')\n"  # a tag inside a string must not end the call
# Recipe keys that only the local trainer reads, with what decides under verl.
LOCAL_ONLY = {
    "engine.count": "verl reads the profile's engine.tensor_parallel",
    "engine.max_batch": "verl reads the profile's engine.max_sequences",
    "engine.memory_share": "verl reads the profile's engine.memory_utilization",
    "engine.dtype": "verl reads the profile's engine.dtype",
    "engine.kind": "verl's servers are vLLM",
    "engine.urls": "verl starts its own servers",
    "engine.deadline_s": "verl waits for its own servers as long as they live",
    "engine.scheduler": "verl's router sends a rollout's turns to one server",
    "rl.micro_batch_tokens": "verl reads the profile's parallelism.tokens_per_gpu",
    "rl.rollout": "verl rolls out asynchronously",
    "processes": "verl reads the profile's GPUs",
}
SFT_LOCAL_ONLY = {
    "packing": "verl packs on GPUs and pads on a CPU; the loss is the same",
    "micro_batch_tokens": "verl reads the profile's parallelism.tokens_per_gpu",
}


def own_functions(subject: Subject) -> str:
    """The tools and the reward that the recipe names are there, and say what they take."""
    rl = subject.recipe.rl
    own = [name for name in rl.tools if name not in CODE_TOOLS]
    if not own and rl.reward == "verify":
        raise NotNeeded("the recipe names none")
    make_tools(own, None, own_timeout_s=rl.tool_timeout_s)
    make_reward(rl.reward, rl.answer)
    return ", ".join([*own, *([rl.reward] if rl.reward != "verify" else [])])


def unread_keys(subject: Subject) -> str:
    """Keys that the chosen trainer cannot honour, and such that another place decides."""
    if subject.profile.trainer != "verl":
        return "the local trainer reads every key"
    from rstar_lab.rl.verl.unsupported import refusals, sft_refusals

    recipe, default = subject.recipe, Recipe(model=subject.recipe.model)
    made = starting_model(recipe, recipe.runs).exists()  # by whatever trainer
    if refused := refusals(recipe) + ([] if made else sft_refusals(recipe)):
        raise UserError(f"not under verl: {'; '.join(refused)}")
    found = [
        f"{key} ({instead})"
        for key, instead in LOCAL_ONLY.items()
        if attrgetter(key)(recipe) != attrgetter(key)(default)
    ]
    found += [
        f"sft.{key} ({instead})"
        for key, instead in SFT_LOCAL_ONLY.items()
        if recipe.sft and getattr(recipe.sft, key) != SftConfig.model_fields[key].default
    ]
    if found:
        raise Warn(f"set, but decided elsewhere: {'; '.join(found)}")
    return "verl reads every key that is set"


def verl_configuration(subject: Subject) -> str:
    """The whole configuration, composed from verl's own files and validated by verl."""
    if subject.profile.trainer != "verl":
        raise NotNeeded(f"profile {subject.profile.name} trains without verl")
    try:
        from rstar_lab.rl.verl import config
        from rstar_lab.rl.verl.resume import stages_of
    except ImportError as error:
        raise Skip(f"verl is not installed here ({error})") from error
    recipe = subject.recipe
    if not recipe.stages:
        raise UserError("stages: the recipe has none to train")
    for settings in stages_of(recipe, recipe.runs.absolute()):
        overrides = config.overrides(settings, subject.profile, Path(recipe.model), subject.verl_overrides)
        composed = config.compose(overrides)
    if recipe.sft is not None:
        run_dir = recipe.runs.absolute() / f"{recipe.name}-sft"
        config.compose(
            config.sft_overrides(recipe, subject.profile, run_dir / "base", run_dir, 1), "sft_trainer_engine"
        )
    what = f"{'its SFT and ' if recipe.sft else ''}each of {len(recipe.stages)} stages"
    return f"verl {metadata.version('verl')} composes it for {what} ({len(composed)} sections)"


# Tokens and data


def token_contract(subject: Subject) -> str:
    """Chat template, loss mask and parser on the recipe's own tokenizer."""
    from rstar_lab.rl.chat_format import parser
    from rstar_lab.rl.chat_format import template as chat

    folder = Path(subject.recipe.model)
    if subject.recipe.model == "tiny":
        raise NotNeeded("the run makes its own tokenizer")
    if not (folder / "tokenizer_config.json").is_file():
        raise Skip(f"tokenizer of {subject.recipe.model} is not on this machine")
    from rstar_lab.rl.models.model import load_tokenizer

    tokenizer = load_tokenizer(folder)
    for token in chat.SPECIAL_TOKENS:
        if len(tokenizer.encode(token, add_special_tokens=False)) != 1:
            raise UserError(
                f"tokenizer: {token} is not one token, so a turn cannot end with it; add it as a special token"
            )
    prompt = chat.render_prompt("What is 1 + 1?")
    if not prompt.endswith(chat.GENERATION_PREFIX):
        raise UserError("chat template: a prompt does not end with the generation prefix")
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    if tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) != prompt:
        raise UserError("tokenizer: a prompt does not survive encoding and decoding")
    call = chat.render_tool_call(chat.CODE_TOOL["function"]["name"], {"code": CODE, "input": ""})
    written = tokenizer.encode(f"I compute.</reason>\n{call}{chat.END_OF_TURN}", add_special_tokens=False)
    parsed = parser.parse_tool_calls(str(tokenizer.decode(written, skip_special_tokens=False)))
    if len(parsed) != 1 or parsed[0].error or (parsed[0].arguments or {}).get("code") != CODE:
        raise UserError(f"parser: a tool call does not survive the tokenizer: {parsed}")
    answer = tokenizer.encode(chat.render_tool_responses(["2"]), add_special_tokens=False)
    joined = tokenizer.decode([*ids, *written, *answer], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    pieces = [prompt, f"I compute.</reason>\n{call}{chat.END_OF_TURN}", chat.render_tool_responses(["2"])]
    if joined != "".join(pieces):
        raise UserError("tokenizer: turns tokenised one by one are not the conversation, so the loss mask would be off")
    return f"prefix, turn end, loss mask and call round trip hold on {len(tokenizer)} tokens"


def data(subject: Subject) -> str:
    """Schema of every stage's problems, and whether sampled true answers verify."""
    from rstar_lab.rl.problems import load_problems
    from rstar_lab.verify import verify

    told = []
    missing = [
        str(one.file)
        for one in (subject.recipe.sft.conversations if subject.recipe.sft else ())
        if not one.file.is_file()
    ]
    for stage in subject.recipe.stages:
        section = stage.problems
        if section.file is None:
            told.append(f"{stage.name}: made on the spot")
            continue
        if not section.file.is_file():
            missing.append(str(section.file))
            continue
        problems = load_problems(section.file, fields={str(ours): theirs for ours, theirs in section.fields.items()})
        if not problems:
            raise UserError(f"stages.{stage.name}.problems: {section.file} holds no problem")
        sampled = problems[:: max(1, len(problems) // SAMPLED_PROBLEMS)][:SAMPLED_PROBLEMS]
        wrong = [p for p in sampled if not verify(f"<answer>\\boxed{{{p.answer}}}</answer>", p.answer)]
        if len(wrong) > len(sampled) // 4:
            raise UserError(
                f"stages.{stage.name}.problems: of {len(sampled)} true answers {len(wrong)} do not verify, e.g. "
                f"{wrong[0].problem_id}: {wrong[0].answer!r}; `rstar-lab data prepare` takes answers out of solutions"
            )
        told.append(
            f"{stage.name}: {len(problems)} problems, {len(sampled) - len(wrong)}/{len(sampled)} answers verify"
        )
    if missing:
        raise Skip(f"not on this machine: {', '.join(missing)}")
    return "; ".join(told) or "no stages"

"""Run a recipe: base model, SFT, RL stages, evaluations. SFT, RL and each evaluation are runs in the run store; finished runs are
not repeated."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rstar_lab.common.errors import UserError
from rstar_lab.common.estimates import format_interval
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.processes import release_free_heap
from rstar_lab.rl.data.mix import read_mix
from rstar_lab.rl.environments.mixture import restricted
from rstar_lab.rl.evaluation import Generate, evaluate, local_rollouts, store_evaluation
from rstar_lab.rl.identity import differing_parts, evaluation_identity, model_hash
from rstar_lab.rl.models.lora import attach_lora
from rstar_lab.rl.models.model import attention_implementation, build_tiny, load_model, load_tokenizer, save_model
from rstar_lab.rl.models.sources import get_model, origin_entry
from rstar_lab.rl.models.tokenizer import repeated_texts, train_tokenizer
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import Recipe, RecipeError, SftConfig
from rstar_lab.rl.recipe.sft import Lora
from rstar_lab.rl.renderers.formats import renderer_type
from rstar_lab.rl.renderers.paper import CONTROL_TOKENS, control_tokens
from rstar_lab.rl.resolved import ResolvedRecipe, read_problems
from rstar_lab.rl.rollout.checks import MAX_PROMPT_TOKENS, overlong_message, split_overlong
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.words import first_step_line
from rstar_lab.rl.session import RunSession, device, open_run, vocabulary
from rstar_lab.rl.synthetic.traces import Segments, Trace, TraceMix, make_traces
from rstar_lab.rl.training.checkpoint import TrainerState
from rstar_lab.rl.training.loggers import open_loggers
from rstar_lab.rl.training.progress_report import MOST_FAIL, compare_models, failed_calls
from rstar_lab.rl.training.sft import sft
from rstar_lab.rl.training.stages import stage_model, stage_table
from rstar_lab.rl.training.teacher import open_servers
from rstar_lab.rl.training.trainer import HeldOut, Trainer
from rstar_lab.runs.files import atomic_write
from rstar_lab.runs.reader import RunReader
from rstar_lab.runs.writer import RunWriter
from rstar_lab.untrusted.text import counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHOWN_TRACES = 500


SFT_KEYS = ("model", "vocabulary", "seed", "processes", "sft", "rl.prompt.format")
RL_KEYS = (*SFT_KEYS, "rl", "stages")


# SFT


async def fine_tune(session: RunSession) -> tuple[Path, Path]:
    """Run the SFT of the recipe, if it has one. Return the model folders before and after SFT."""
    recipe, reporter = session.recipe, session.reporter
    if recipe.sft is None:
        if recipe.model == "tiny":
            raise RecipeError("recipe: model `tiny` has random weights and requires an sft section")
        return (get_model(recipe.model),) * 2
    with open_run(session, "sft", "train", SFT_KEYS) as writer:
        base, after = base_folder(recipe, writer.run_dir), writer.run_dir / "sft" / "model"
        if sft_finished(recipe, writer.run_dir):
            writer.finish("finished")
            return base, after
        helpers = session.helpers()
        dataset = await sft_data(session, writer.run_dir)
        # `sft` attaches the adapters.
        model = load_policy(base, recipe.sft.lora, seed=None, bf16=recipe.sft.precision != "fp32")
        tokenizer = load_tokenizer(base)
        if session.spawned is not None and device().type == "cpu":  # on a GPU, SFT needs the memory
            session.start_engines(base)
        config = SftConfig(**recipe.sft.model_dump(include=set(SftConfig.model_fields)))
        with reporter.work("sft") as work:
            stopped = threading.Event()

            def on_step(line: dict[str, float]) -> None:
                if stopped.is_set():
                    raise KeyboardInterrupt
                step = int(line["step"])
                write_sft_step(writer, line)
                work.total = int(line["steps"])
                work.update(step, f"loss {line['loss']:.3f}", every_s=5, **line)

            # SFT runs in a thread, so that Ctrl-C can cancel this task; the thread stops at its next step.
            try:
                result = await asyncio.to_thread(
                    sft, model, tokenizer, dataset, config=config,
                    out_dir=writer.run_dir / "sft", helpers=helpers, on_step=on_step, prompt_format=recipe.rl.prompt.format,
                )  # fmt: skip
            finally:
                stopped.set()
        del model
        if torch.cuda.is_available():  # the engines that start next need the memory of freed tensors
            gc.collect()
            torch.cuda.empty_cache()
        release_free_heap()
        writer.finish("finished", result=result)
    return base, after


def load_policy(folder: Path, lora: Lora | None, *, seed: int | None, bf16: bool) -> "PreTrainedModel":
    """Load a model that is trained, on its device. seed: of new adapters; None: attach none. bf16: whether updates use bf16."""
    attention = attention_implementation(device(), bf16=bf16)
    frozen_bf16 = lora is not None and bf16 and device().type == "cuda"  # the base of adapters
    model = load_model(folder, torch.bfloat16 if frozen_bf16 else torch.float32, attn_implementation=attention)
    if lora is not None and seed is not None:
        attach_lora(model, lora, seed)
    return model.to(device())  # type: ignore[arg-type]


def base_folder(recipe: Recipe, run_dir: Path) -> Path:
    """Return the folder of the model before SFT: that of the recipe's model, or run_dir/base for `tiny`, which SFT builds."""
    return run_dir / "base" if recipe.model == "tiny" else get_model(recipe.model).resolve()


def sft_finished(recipe: Recipe, run_dir: Path) -> bool:
    """Return whether the SFT of this run is finished."""
    return (run_dir / "sft" / "sft.json").exists() and base_folder(recipe, run_dir).exists()


async def sft_data(session: RunSession, run_dir: Path) -> list[Segments]:
    """Return the SFT conversations. Write the base model `tiny` to run_dir/base, and the first traces to run_dir/traces.jsonl."""
    recipe = session.recipe
    assert recipe.sft is not None
    traces = await make_sft_traces(session)
    with atomic_write(run_dir / "traces.jsonl") as file:
        file.write("".join(json.dumps(asdict(trace)) + "\n" for trace in traces[:_SHOWN_TRACES]).encode())
    renderer = renderer_type(recipe.rl.prompt_style.prompt_format)
    dataset = [trace.segments(renderer) for trace in traces]
    tokens = CONTROL_TOKENS if recipe.model == "tiny" else control_tokens(load_tokenizer(recipe.model))
    conversations = read_mix(recipe.sft.conversations, seed=recipe.seed, on_count=session.reporter.print_line)
    dataset += [conversation.segments(tokens, renderer) for conversation in conversations]
    if recipe.model == "tiny":
        build_base(recipe, dataset, run_dir / "base")
    return dataset


def write_sft_step(writer: RunWriter, line: Mapping[str, float]) -> None:
    """Write the first twenty SFT steps, which show where the loss begins, and every twentieth to the run store."""
    step = int(line["step"])
    if (step <= 20 or step % 20 == 0) and step > (writer.last_step or 0):
        metrics = {name: line[name] for name in ("loss", "lr", "grad_norm", "tokens")}
        writer.write_step("sft", step, trajectories=[], calls=[], transcripts=[], metrics=metrics)


async def make_sft_traces(session: RunSession) -> list[Trace]:
    """Return the executed traces of `sft.problems`, or an empty list if the recipe has no such key."""
    assert session.recipe.sft is not None
    if session.recipe.sft.problems is None:
        return []
    problems = read_problems(session.recipe.sft.problems, exclude=session.resolved.excluded)
    sandbox = await session.sandbox()
    with session.reporter.work("traces") as work:

        def progress(done: int, total: int) -> None:
            work.total = total
            work.update(done, "programs run", every_s=5)

        return await make_traces(
            problems,
            sandbox,
            seed=session.recipe.seed,
            mix=TraceMix(**session.recipe.sft.mix),
            renderer=renderer_type(session.recipe.rl.prompt_style.prompt_format),
            cache=session.runs_dir / ".cache",
            progress=progress,
        )


def build_base(recipe: Recipe, dataset: Sequence[Segments], folder: Path) -> None:
    """Write a tiny model with random weights, and a tokenizer of the conversations, to `folder`."""
    # Segments are encoded separately, so the tokenizer must not merge across their borders.
    texts = [text for segments in dataset[:4000] for text, _ in segments]
    tokenizer = train_tokenizer(texts, recipe.vocabulary, single_tokens=repeated_texts(recipe.rl.prompt.format))
    save_model(folder, build_tiny(tokenizer, seed=recipe.seed), tokenizer, prompt_format=recipe.rl.prompt.format)


# RL


async def train(session: RunSession, model_dir: Path, *, parent: dict[str, Any] | None = None) -> Path:
    """Run all RL stages from the model in `model_dir`. Return the folder of the trained model."""
    recipe, reporter = session.recipe, session.reporter
    if not recipe.stages:
        raise RecipeError("stages: the recipe has no stages to train")
    total = sum(stage.steps for stage in recipe.stages)
    with open_run(session, "rl", "train", RL_KEYS, parent=parent) as writer:
        checkpoint = writer.latest_checkpoint()
        state = TrainerState.read(checkpoint[1]) if checkpoint else TrainerState()
        if checkpoint and state.finished and not has_more_steps(recipe, state):
            writer.finish("finished")
            return checkpoint[1]
        if (last := writer.last_step or 0) > state.step:
            reporter.print_line(f"continuing after step {state.step}: steps {state.step + 1} to {last} are repeated")
        helpers = session.helpers()
        bf16 = all(recipe.settings(stage).precision != "fp32" for stage in recipe.stages)
        model = load_policy(model_dir, recipe.rl.lora, seed=recipe.seed, bf16=bf16)
        tokenizer = load_tokenizer(model_dir)
        writer.write_vocabulary(vocabulary(tokenizer))
        engines, tools = await session.engines(model_dir), await session.tools()
        environments = await session.environments()
        context = await session.context(tokenizer, in_training=True)

        async def evaluate_step(step: int) -> HeldOut:
            def rollouts_of(problems: Sequence[Problem], run: str) -> Generate:
                return local_rollouts(
                    problems, context, engines=engines, mode=recipe.rl.rollout_mode, context_length=engines.context
                )

            return await evaluate_sets(session, rollouts_of, {"run": writer.run_dir.name, "step": step})

        config = recipe.model_dump(mode="json")
        async with AsyncExitStack() as stack:
            work = stack.enter_context(reporter.work("rl", total))
            log = stack.enter_context(open_loggers(recipe.log_to, writer.run_dir, config))
            opened = open_servers([*map(recipe.settings, recipe.stages)], recipe.engine, tokenizer, engines.context)
            servers = await stack.enter_async_context(opened)

            def on_step(metrics: dict[str, Any]) -> None:
                if "generate_gb" in metrics:  # the first step of this process
                    line = first_step_line(metrics, tools=bool(tools), steps=total - metrics["step"])
                    reporter.print_line(line)
                    reporter.emit("first_step", line=line)
                work.update(metrics["step"], step_line(metrics), **metrics)
                log(metrics["step"], metrics)

            trainer = Trainer(
                recipe,
                model=model,
                tokenizer=tokenizer,
                engines=engines,
                tools=tools,
                reward=session.reward,
                writer=writer,
                problems=stage_problems(session, context.codec, session.max_sequence_tokens(model_dir)),
                helpers=helpers,
                evaluate=evaluate_step,
                environments=environments,
                servers=servers,
                on_step=on_step,
            )
            await trainer.run()
        checkpoint = writer.latest_checkpoint()
        assert checkpoint is not None
        return checkpoint[1]


def has_more_steps(recipe: Recipe, state: TrainerState) -> bool:
    """Return whether the last stage of a finished run has got more steps in the recipe."""
    last = recipe.stages[-1]
    ends_early = last.hand_off or recipe.settings(last).retire_from is not None
    return state.stage == len(recipe.stages) - 1 and not ends_early and state.stage_step < last.steps


def stage_problems(session: RunSession, codec: Codec, max_tokens: int) -> dict[str, Sequence[Problem]]:
    """Return the problems of each stage, without those whose prompt is too long, whose number is printed.

    max_tokens: longest sequence of the engines.
    """
    recipe, found = session.recipe, dict[str, Sequence[Problem]]()
    for stage in recipe.stages:
        problems = session.resolved.problems[stage.name]
        kept, overlong = split_overlong(problems, codec, min(MAX_PROMPT_TOKENS, max_tokens - 1))
        if overlong:
            session.reporter.print_line(overlong_message(stage.name, overlong, len(problems)))
            session.reporter.emit("overlong_prompts", stage=stage.name, dropped=len(overlong), problems=len(problems))
            if not kept:
                raise UserError(overlong_message(stage.name, overlong, len(problems)))
            problems = restricted(problems, kept)
        found[stage.name] = problems
    return found


async def evaluate_sets(
    session: RunSession,
    rollouts_of: Callable[[Sequence[Problem], str], Generate],
    parent: dict[str, Any] | None,
    model: str | None = None,
) -> HeldOut:
    """Evaluate the recipe's sets with the weights that the engines hold.

    rollouts_of: (problems, run id) -> generator of the rollouts, for `store_evaluation`. parent: run and step of the weights. model:
    name of the model that the weights are, such as `base`, `sft`, `rl-one` (after stage one) or `rl`, which is evaluated with
    `evaluate`; None: an evaluation during the training, with `evaluate.during`.

    Returns pass1, low, high and response_tokens of each set; low and high are absent for a set of one problem. The
    rollouts are stored as run `<recipe>-<set>-step<step>`, or `<recipe>-<set>-<model>`. If an earlier attempt was
    interrupted, all rollouts are generated again, because its weights may differ.
    """
    results: dict[str, dict[str, float]] = {}
    settings = session.recipe.evaluate if model else session.recipe.evaluate.in_training()
    for name in settings.sets:
        problems = session.held_out[name]
        suffix = f"{name}-{model}" if model or parent is None else f"{name}-step{parent['step']:06d}"
        with open_run(session, suffix, "evaluate", (), parent=parent) as writer:
            writer.cut(0)
            result = await store_evaluation(
                problems,
                rollouts_of(problems, writer.run_dir.name),
                samples=model_samples(session.recipe, model) if model else settings.samples,
                writer=writer,
                seed=session.recipe.seed,
            )
        interval = dict(zip(("pass1", "low", "high"), result["pass1"], strict=True))
        interval["response_tokens"] = result["response_tokens"]
        results[name] = {key: number for key, number in interval.items() if number is not None}
    return results


def step_line(m: dict[str, Any]) -> str:
    """Return the progress line of a step. m: its metrics."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return (
        f"pass {share(m['correct'])} · tool errors {share(m['error_rate'])} (in correct {share(m['error_rate_correct'])}) · "
        f"{m['response_tokens'] or 0:.0f} tokens · kept {m['kept']} · generate {m['generate_s']:.1f} s + update {m['update_s']:.1f} s"
    )


# Evaluation


async def evaluate_model(
    session: RunSession,
    model_dir: Path,
    problems: Sequence[Problem],
    suffix: str,
    *,
    parent: dict[str, Any] | None = None,
    as_served: bool = False,
    samples: int | None = None,
    model_identity: str | None = None,
    sets: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Evaluate the model in a folder on problems, as run `<recipe>-<suffix>`. A finished run returns its stored result.

    as_served: the engines are servers that already serve the model; only the tokenizer is read from the folder.
    samples: rollouts per problem; default: the recipe's. model_identity: default: the hash of the model folder.
    sets: problem ids by name of the set, if the problems are of several sets.
    Raises RecipeError if the run exists and its identity (`evaluation_identity`) differs.
    """
    recipe, reporter = session.recipe, session.reporter
    folder = session.runs_dir / session.run_id(suffix)
    samples = samples or recipe.evaluate.samples
    weights = model_identity or model_hash(model_dir, session.runs_dir / ".cache")
    identity = evaluation_identity(recipe, problems, weights, samples)
    if (folder / "run.json").exists():
        info = RunReader(folder).info
        # Runs of older versions have no identity.
        if differing := differing_parts((info.get("extra") or {}).get("identity", identity), identity):
            raise RecipeError(
                f"evaluation {folder} was made with other settings ({differing}):"
                " choose --set name=..., or another --runs-dir"
            )
        if info["status"] == "finished":
            return info.get("result") or {}
    extra = {"model": str(model_dir), "identity": identity} | origin_entry(model_dir)
    extra |= {"sets": {name: list(ids) for name, ids in sets.items()}} if sets else {}
    with open_run(session, suffix, "evaluate", ("evaluate",), parent=parent, extra=extra) as writer:
        tokenizer = load_tokenizer(model_dir)
        writer.write_vocabulary(vocabulary(tokenizer))
        engines = await session.engines(model_dir)
        context = await session.context(tokenizer)
        if not as_served:
            await engines.load_folder(model_dir)
        with reporter.work(suffix, len(problems)) as work:
            result = await evaluate(
                problems,
                context,
                samples=samples,
                engines=engines,
                writer=writer,
                seed=recipe.seed,
                mode=recipe.rl.rollout_mode,
                progress=lambda done, total: work.update(done, "problems", every_s=5),
                sets=sets,
            )
    reporter.print_line(
        f"{suffix}: pass@1 {format_interval(result['pass1'])} on {counted(result['problems'], 'problem')} x {result['samples']}"
    )
    return result


# All parts of a recipe


async def run_recipe(
    resolved: ResolvedRecipe, reporter: Reporter, *, stages: bool, evaluations: bool
) -> dict[str, Any]:
    """Run the SFT of a recipe, its RL stages if `stages`, and its evaluations if `evaluations`.

    Returns the folder of each model under `model_<name>`, the result of each evaluation under `<name>/<set>`, what changed from
    model to model in lines under `progress`, and if RL had nothing to learn from, the reason under `nothing_learnt`.
    """
    recipe = resolved.recipe
    async with RunSession.open(resolved, reporter) as session:
        base, after_sft = await fine_tune(session)
        models = {"base": base, "sft": after_sft} if recipe.sft else {"base": base}
        parents: dict[str, dict[str, Any]] = {"sft": {"run": session.run_id("sft"), "step": None}}
        evaluated: dict[str, dict[str, Any]] = {}
        if evaluations:
            evaluated = await evaluate_models(session, models, parents)
            if stages and recipe.stages:
                warn_of_failed_calls(session, "sft" if recipe.sft else "base")
        if stages and recipe.stages:
            trained = await train(session, after_sft, parent=parents["sft"] if recipe.sft else None)
            run_dir = recipe.runs / session.run_id("rl")
            table = stage_table(recipe.stages, run_dir)
            parents["rl"] = {"run": run_dir.name, "step": table[-1]["last_step"]}
            for row in table[:-1]:  # the model of the last stage is "rl"
                name = f"rl-{row['stage']}"
                models[name] = stage_model(run_dir, row["stage"])
                parents[name] = {"run": run_dir.name, "step": row["last_step"]}
            models["rl"] = trained
        results: dict[str, Any] = {f"model_{name}": str(path) for name, path in models.items()}
        if "rl" in models:
            outcome = RunReader(recipe.runs / session.run_id("rl")).info.get("result") or {}
            results |= {key: outcome[key] for key in outcome.keys() & {"nothing_learnt"}}
        if evaluations:
            later = {name: path for name, path in models.items() if name not in ("base", "sft")}
            evaluated |= await evaluate_models(session, later, parents)
            results |= evaluated
            results["progress"] = progress_lines(session, [*models], parents)
        return results


async def evaluate_models(
    session: RunSession, models: Mapping[str, Path], parents: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Evaluate models, by their names, on all sets. Return the results by `<name>/<set>`."""
    results = {}
    for name, path in models.items():
        for held_out, problems in session.held_out.items():
            suffix = evaluation_suffix(session, held_out, name, parents)
            results[f"{name}/{held_out}"] = await evaluate_model(
                session, path, problems, suffix, parent=parents.get(name), samples=model_samples(session.recipe, name)
            )
    return results


def model_samples(recipe: Recipe, name: str) -> int:
    """Return the rollouts per problem in the evaluation of the model `name`: 1 for random weights, which never end a response."""
    return 1 if name == "base" and recipe.model == "tiny" else recipe.evaluate.samples


def is_evaluated(recipe: Recipe, name: str) -> bool:
    """Return whether the evaluations of the model `name` on all sets are finished."""
    runs = [recipe.runs / f"{recipe.name}-{held_out}-{name}" for held_out in recipe.evaluate.sets]
    return all((run / "run.json").exists() and RunReader(run).status == "finished" for run in runs)


def evaluation_suffix(session: RunSession, held_out: str, name: str, parents: Mapping[str, dict[str, Any]]) -> str:
    """Return the suffix of the run of an evaluation. A model after more steps of a finished run has its step in it."""
    suffix, step = f"{held_out}-{name}", parents.get(name, {}).get("step")
    folder = session.runs_dir / session.run_id(suffix)
    earlier = (RunReader(folder).info.get("parent") or {}).get("step") if (folder / "run.json").exists() else step
    return suffix if step is None or earlier == step else f"{suffix}-{step}"


def warn_of_failed_calls(session: RunSession, name: str) -> None:
    """Print a warning if most calls of the model that RL starts from fail in its evaluations."""
    for held_out in session.held_out:
        share = failed_calls(session.runs_dir / session.run_id(f"{held_out}-{name}"))
        if share is not None and share > MOST_FAIL:
            remedy = "give sft more conversations or epochs" if session.recipe.sft else "teach them with an sft section"
            session.reporter.print_line(
                f"warning: {share:.0%} of the calls on {held_out} fail before RL, which then learns little: {remedy}"
            )


def progress_lines(session: RunSession, names: Sequence[str], parents: Mapping[str, dict[str, Any]]) -> list[str]:
    """Return what changed from each model to the next on each set, and the next command. names: of the models, in order."""
    lines: list[str] = []
    for held_out in session.held_out:
        folders = [
            session.runs_dir / session.run_id(evaluation_suffix(session, held_out, name, parents)) for name in names
        ]
        for before, after in pairwise(folders):
            found, fails = compare_models(before, after)
            lines += [*found, *(["  most calls fail: `doctor` below says why"] if fails else [])]
    if "rl" in names:
        lines.append(f"next: rstar-lab doctor {session.runs_dir / session.run_id('rl')}")
    return lines

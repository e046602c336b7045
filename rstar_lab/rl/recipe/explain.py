"""Errors of a recipe in words: the key, what is wrong, and the nearest valid key."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Annotated, Any, get_args, get_origin

from pydantic import ValidationError

from rstar_lab.rl.problems import FIELDS
from rstar_lab.rl.recipe.rl import RlSection
from rstar_lab.rl.recipe.synonyms import synonym_line
from rstar_lab.rl.section import NEAR, ByType, Section

PAGE = "docs/coming-from-rstar.md"
ROOTS = (
    "augmentation", "data", "actor_rollout_ref", "algorithm", "reward_model", "trainer", "critic", "ray_init",
    # Beginnings of keys as docs/coming-from-rstar.md shortens them
    "down_sampling_config", "rollout", "actor", "multi_turn", "val_kwargs", "custom_reward_function",
)  # fmt: skip
VERL_ROOTS = (
    "data",
    "actor_rollout_ref",
    "algorithm",
    "trainer",
)  # of these, `verl.KEY` sets the keys without a counterpart
# Keys of examples/*.sh and rstar2_agent/config in microsoft/rStar, by their longest suffix here, and what to set instead; and the
# environment variables of its README.
RELEASE_KEYS = {
    "down_sample_to_n": "set rl.group_size",
    "rollout.n": "set rl.method.roc.oversample, so that rl.group_size * oversample is this number",
    "do_down_sampling": "set rl.method.roc.rule: released, or none",
    "roc_error_ratio": "set rl.method.roc.rule: released, with errors in rl.method.roc.penalties",
    "roc_answer_format": "set rl.method.roc.rule: released, with format in rl.method.roc.penalties",
    "min_zero_reward_trace_num": "set rl.method.roc.min_negative",
    "min_non_zero_reward_trace_num": "set rl.method.roc.min_positive",
    "reject_equal_reward": "leave it out: groups with equal rewards are always dropped",
    "train_batch_size": "set rl.problems_per_step",
    "max_response_length": "set rl.limits.max_response_tokens, and evaluate.max_response_tokens",
    "max_prompt_length": "leave it out: the limit is 2,048 tokens",
    "filter_overlong_prompts": "leave it out: problems with a prompt of more than 2,048 tokens are left out and counted",
    "truncation": "leave it out: prompts are never truncated",
    "return_raw_chat": "leave it out",
    "train_files": "set stages.0.problems.file",
    "val_files": "set evaluate.sets",
    "model.path": "set model",
    "custom_chat_template": "set rl.prompt.format: released",
    "hybrid_engine": "leave it out: engines and trainer share the GPUs",
    "use_remove_padding": "leave it out: sequences are always packed",
    "use_dynamic_bsz": "leave it out: micro-batches are always filled by tokens",
    "log_prob_use_dynamic_bsz": "leave it out: micro-batches are always filled by tokens",
    "param_offload": "set parallelism.offload_params in the profile",
    "optimizer_offload": "set parallelism.offload_optimizer in the profile",
    "optim.lr": "set rl.lr",
    "lr_warmup_steps": "set rl.warmup_steps",
    "optim.weight_decay": "set rl.weight_decay",
    "grad_clip": "set rl.max_grad_norm",
    "ppo_mini_batch_size": "set rl.mini_batches, the number of mini-batches of a step",
    "ppo_max_token_len_per_gpu": "set parallelism.tokens_per_gpu in the profile, or rl.micro_batch_tokens without verl",
    "ppo_epochs": "leave it out: a rollout is used in one update",
    "use_kl_loss": "set rl.method.kl_coefficient",
    "kl_loss_coef": "set rl.method.kl_coefficient",
    "kl_loss_type": "leave it out: rl.method.kl_coefficient uses low_var_kl",
    "use_kl_in_reward": "leave it out: there is no KL term in the reward",
    "entropy_coeff": "leave it out: there is no entropy term",
    "clip_ratio": "set rl.method.clip_low and rl.method.clip_high",
    "clip_ratio_low": "set rl.method.clip_low",
    "clip_ratio_high": "set rl.method.clip_high",
    "loss_agg_mode": "set rl.method.aggregation",
    "loss_mode": "set rl.method.loss",
    "adv_estimator": "set rl.method.type",
    "norm_adv_by_std_in_grpo": "set rl.method.normalise_std",
    "enable_gradient_checkpointing": "set rl.gradient_checkpointing",
    "max_assistant_turns": "set rl.limits.max_turns, and evaluate.max_turns",
    "max_parallel_calls": "set rl.limits.max_calls_per_turn",
    "max_tool_response_length": "set rl.limits.max_tool_chars",
    "tool_response_truncate_side": "set rl.limits.tool_truncate_side",
    "multi_turn.enable": "leave it out: set rl.limits.max_turns",
    "multi_turn.format": "set rl.prompt.format: released",
    "agent_loop_config_path": "leave it out: rl.environments and rl.tools decide",
    "request_processor_concurrency": "leave it out: calls are sent in batches without settings",
    "request_processor_batch_size": "leave it out: calls are sent in batches without settings",
    "request_processor_batch_timeout_seconds": "leave it out: calls are sent in batches without settings",
    "host_addr": "set sandbox.url",
    "host_port": "set sandbox.url",
    "tool_config_path": "set rl.tools, such as [python_released]",
    "rollout.name": "leave it out: the engines are vLLM; SGLang is not supported",
    "rollout.temperature": "set rl.temperature",
    "rollout.mode": "leave it out: set rl.schedule.lockstep, which is off by default",
    "rollout.trace": "leave it out: the run store has every rollout; the inspector shows them",
    "trace.backend": "leave it out: the run store has every rollout; the inspector shows them",
    "trace.token2text": "leave it out: the run store has texts and tokens",
    "agent.num_workers": "leave it out: the profile decides",
    "val_kwargs.n": "set evaluate.samples",
    "val_kwargs.temperature": "set evaluate.temperature",
    "val_kwargs.top_p": "set evaluate.top_p",
    "val_kwargs.do_sample": "set evaluate.temperature; 0 is greedy",
    "tensor_model_parallel_size": "set engine.tensor_parallel in the profile",
    "gpu_memory_utilization": "set engine.memory_utilization in the profile, or engine.gpu_memory_utilization without verl",
    "custom_reward_function.path": "set rl.reward, to your own module:function",
    "custom_reward_function.name": "set rl.reward, to your own module:function",
    "reward_manager": "set rl.reward, such as released",
    "total_training_steps": "set stages.0.steps",
    "total_epochs": "set stages.0.steps",
    "save_freq": "set rl.checkpoint_every",
    "test_freq": "set evaluate.during.every",
    "val_before_train": "leave it out: `rstar-lab run` evaluates the model before RL",
    "val_only": "run `rstar-lab evaluate`",
    "critic_warmup": "leave it out: there is no critic",
    "logger": "set log_to, or verl.trainer.logger under verl",
    "project_name": "set label",
    "experiment_name": "set name",
    "n_gpus_per_node": "set hardware.gpus_per_node in the profile",
    "nnodes": "set hardware.nodes in the profile",
    "default_local_dir": "set --runs-dir",
    "resume_mode": "leave it out: the same command resumes a run",
    "MODEL_PATH": "set model",
    "MAX_EXECUTION_TIME": "set sandbox.timeout_s",
    "MAX_MEMORY": "set sandbox.memory_mb",
    "MAX_WORKERS": "set sandbox.workers",
    "RUN_WORKERS": "leave it out: each command starts a local sandbox",
    "REDIS_URI": "set sandbox.url, to a server of `rstar-lab sandbox serve --redis URL`",
    "WORKSPACE": "leave it out: each command starts or finds the sandbox",
    "MASTER_ADDR": "leave it out: each command starts or finds the sandbox",
}


def advice(key: str) -> str | None:
    """Return what to set instead of a key of the release; None if the key is not one."""
    parts = key.lstrip("+~").split(".")
    for start in range(len(parts)):
        if found := RELEASE_KEYS.get(".".join(parts[start:])):
            return found
    return None


def release_line(key: str) -> str | None:
    """Return the line of an error about a key of the release; None if the key is not one."""
    return f"{key}: a key of microsoft/rStar; {found} ({PAGE})" if (found := advice(key)) else None


def _near_release_line(key: str) -> str:
    """Return the line of an error about a key in a section of the release that the release does not set."""
    last = {name.rpartition(".")[2].lower(): name for name in RELEASE_KEYS}
    if near := difflib.get_close_matches(key.rpartition(".")[2].lower(), last, n=1, cutoff=0.85):
        return f"{key}: unknown key; did you mean {last[near[0]]}? Of microsoft/rStar; {RELEASE_KEYS[last[near[0]]]} ({PAGE})"
    bare = key.lstrip("+~")
    verl = f"; under verl, set verl.{bare}" if "." in bare and bare.split(".")[0] in VERL_ROOTS else ""
    return f"{key}: a key of microsoft/rStar; it has no counterpart{verl} ({PAGE})"


def leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the dotted keys of the values in a mapping."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{key}.{name}", inner)
    else:
        yield key


def explain(error: ValidationError, root: type[Section], stage: type[Section] | None = None) -> str:
    """Return the errors of a section in one line, each with its dotted key.

    root: the section that was validated. stage: the section of a stage, which also accepts the keys of `rl`.
    """
    return "; ".join(dict.fromkeys(_line(item, root, stage) for item in error.errors()))


def _line(item: Any, root: type[Section], stage: type[Section] | None) -> str:
    place = _Place(root, item["loc"])
    key = ".".join((*place.parts, *filter(None, (item.get("ctx", {}).get("key"),))))
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] != "extra_forbidden":
        message += _remedy(item, place)
        return f"{key}: {message}" if key else message
    name = place.parts[-1]
    if owners := [kind for kind, other in place.others.items() if name in other.model_fields]:
        return f"{key}: not a key of {place.kind}; it belongs to {', '.join(owners)}"
    unset = list(leaves(key, item["input"]))
    if place.section is root and name.lstrip("+~") in ROOTS:
        return "; ".join(release_line(leaf) or _near_release_line(leaf) for leaf in unset)
    keys = {known: known for known in (place.section.model_fields if place.section else FIELDS)}
    if place.section in (RlSection, stage):
        keys |= _keys_inside(RlSection) | {known: known for known in RlSection.model_fields}
    near = [keys[found] for found in difflib.get_close_matches(name, keys, n=1, cutoff=NEAR)]
    if name not in keys and (line := synonym_line(key)):
        return line
    if (
        name not in root.model_fields
        and (name in RELEASE_KEYS or not near)
        and all(lines := [release_line(leaf) for leaf in unset])
    ):
        return "; ".join(filter(None, lines))
    text = f"{key}: unknown key" + (f" of {place.kind}" if place.kind else "")
    parent = f"{key.removesuffix(name)}" if near and "." in near[0] else ""
    return text + (f"; did you mean {parent}{near[0]}?" if near else "")


def _remedy(item: Any, place: "_Place") -> str:
    """Return how to write a value of the wrong kind; empty if the message says enough."""
    value = item["input"]
    if item["type"] == "string_type" and isinstance(value, int | float | date):
        return f'; write it in quotes, as "{value}" (with --set: \'{place.parts[-1]}="{value}"\')'
    if item["type"] in ("model_type", "dict_type") and place.below:
        return f"; give its keys, as in {{{next(iter(place.below.model_fields))}: VALUE}}"
    return ""


def _keys_inside(section: type[Section]) -> dict[str, str]:
    """Return {last part of a key: key} for the sections inside a section, such as clip_low: method.clip_low."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                inside = _keys_inside(kind) | {key: key for key in kind.model_fields}
                found = {key: f"{name}.{place}" for key, place in inside.items()} | found
    return found


class _Place:
    """The place of an error in a recipe.

    parts: the dotted key. section: the section that has or lacks the last part; None: not a section. kind, others: if a key
    selects the section, that key with its value and the other sections by the value.
    """

    def __init__(self, root: type[Section], location: Sequence[str | int]):
        self.parts: list[str] = []
        self.section: type[Section] | None = root
        self.kind, self.others = "", dict[str, type[Section]]()
        self.below: type[Section] | None = None  # the section that the value should be
        annotation: Any = root
        for part in location:
            annotation, by_type = _bare(annotation)
            if by_type is not None:
                members = by_type.members(annotation)
                annotation = members[str(part)]
                self.kind = f"{by_type.key}: {part}"
                self.others = {name: other for name, other in members.items() if other is not annotation}
                self.section = annotation
                continue
            if str(part).startswith(("literal[", "function-after[")):  # one of several types of a value
                continue
            self.parts.append(str(part))
            if isinstance(annotation, type) and issubclass(annotation, Section):
                if annotation is not self.section:
                    self.kind, self.others = "", {}
                self.section = annotation
                field = annotation.model_fields.get(str(part))
                annotation = Annotated[field.annotation, *field.metadata] if field and field.metadata else field
                annotation = field.annotation if field and not field.metadata else annotation
            elif get_origin(annotation) in (tuple, dict):
                annotation = get_args(annotation)[0 if get_origin(annotation) is tuple else 1]
            else:
                annotation, self.section = None, None
        below = _bare(annotation)[0]
        self.below = below if isinstance(below, type) and issubclass(below, Section) else None


def _bare(annotation: Any) -> tuple[Any, ByType | None]:
    """Return an annotation without its metadata and without None, and the ByType of a union."""
    by_type = None
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        by_type = next((item for item in metadata if isinstance(item, ByType)), None)
    if by_type is None:
        sections = [kind for kind in get_args(annotation) if isinstance(kind, type) and issubclass(kind, Section)]
        if sections and get_origin(annotation) not in (tuple, dict):
            annotation = sections[0]
    return annotation, by_type

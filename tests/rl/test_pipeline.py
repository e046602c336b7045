"""The pieces of a recipe's run: where SFT runs, and what a step's progress line shows."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.scripted_training import TOKENIZER, Player, problem, recipe_of, right, tiny
from helpers.tiny_models import make_model

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.hardware.profiles import EXPECTED_GPUS
from rstar_lab.rl import pipeline
from rstar_lab.rl import session as session_module
from rstar_lab.rl.engines.group import EngineGroup
from rstar_lab.rl.evaluation import local_rollouts
from rstar_lab.rl.models.model import attention_implementation
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.recipe import EngineSection, Section
from rstar_lab.rl.recipe.recipe import SAME_IN_ALL_STAGES
from rstar_lab.rl.resolved import ResolvedRecipe, resolve
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.training.trainer import Trainer
from rstar_lab.runs.reader import RunReader

SFT = {"problems": {"synthetic": {"count": 1}}}


async def test_sft_runs_on_the_accelerator(tmp_path, monkeypatch):
    devices = []

    async def sft_data(session: RunSession, run_dir: Path):
        dataset = [[("a question", False), ("an answer", True)]]
        pipeline.build_base(session.recipe, dataset, run_dir / "base")
        return dataset

    def sft(model, *arguments, **options):
        devices.append({parameter.device.type for parameter in model.parameters()})
        return {}

    monkeypatch.setattr(pipeline, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(pipeline, "sft_data", sft_data)
    monkeypatch.setattr(pipeline, "sft", sft)
    recipe = parse_recipe({"name": "r", "model": "tiny", "vocabulary": 300, "runs": str(tmp_path), "sft": SFT})
    async with RunSession.open(resolve(recipe), Reporter(True)) as session:
        await pipeline.fine_tune(session)
    assert devices == [{"meta"}]


async def test_sft_of_a_given_model_resumes_without_a_link_to_it(tmp_path, monkeypatch):
    interrupted = [True]

    def sft(*arguments, **options):
        if interrupted.pop():
            raise RuntimeError("killed")
        return {}

    monkeypatch.setattr(pipeline, "sft", sft)
    interrupted.insert(0, False)
    model = tmp_path / "model"
    make_model(model)
    keys = {"name": "r", "model": str(model), "runs": str(tmp_path / "runs"), "processes": 1, "sft": SFT}
    async with RunSession.open(resolve(parse_recipe(keys)), Reporter(True)) as session:
        with pytest.raises(RuntimeError, match="killed"):
            await pipeline.fine_tune(session)
        before, _ = await pipeline.fine_tune(session)
    assert before == model.resolve() and not interrupted
    assert not [path for path in (tmp_path / "runs" / "r-sft").rglob("*") if path.is_symlink()]


async def test_evaluation_during_training_is_a_run_and_metrics(tmp_path):
    evaluate = {
        "sets": {"held": {"synthetic": {"count": 1}}},
        "samples": 4,
        "during": {"every": 2},
        "max_response_tokens": 200,
    }
    recipe = parse_recipe({"name": "r", "model": "tiny", "runs": str(tmp_path), "evaluate": evaluate})
    session = RunSession(resolve(recipe), Reporter(True))
    session.held_out = {"held": [problem("easy", 1.0), problem("mixed", 0.5)]}
    context = RolloutContext.for_evaluation(Codec(TOKENIZER, {}), {}, right, recipe.rl, recipe.evaluate)
    player = Player()
    player.versions.append(0)
    engines = EngineGroup([player], tmp_path, 64)  # type: ignore[list-item]
    for _ in range(2):  # the second time as after a kill: everything is generated again
        found = await pipeline.evaluate_sets(
            session,
            lambda problems, run: local_rollouts(problems, context, engines=engines, mode="async", context_length=1000),
            {"run": "r-rl", "step": 2},
        )
        reader = RunReader(tmp_path / "r-held-step000002")
        assert reader.info["parent"] == {"run": "r-rl", "step": 2} and reader.info["status"] == "finished"
        result = reader.info["result"]
        assert result["n"] == 8 and reader.read("trajectories").num_rows == 8
        assert [found["held"][name] for name in ("pass1", "low", "high")] == result["pass1"]
        assert found["held"]["response_tokens"] == result["response_tokens"]


def watched(section: Section, read: set[str], place: str = ""):
    """Return a copy of a section that adds each key to `read` that is read from it."""

    class Watched(type(section)):
        def __getattribute__(self, name: str):
            value = super().__getattribute__(name)
            if name in type(section).model_fields and not isinstance(value, Section):
                read.add(place + name)
            return watched(value, read, f"{place}{name}.") if isinstance(value, Section) else value

    return Watched.model_construct(**dict(section))


async def test_a_key_that_training_reads_once_for_all_stages_cannot_differ_between_them(tmp_path):
    recipe, read = recipe_of([{"name": "one", "steps": 1}], tools=[]), set[str]()
    stage = recipe.settings(recipe.stages[0])
    recipe = recipe.model_copy(update={"rl": watched(recipe.rl, read), "runs": tmp_path})
    session = RunSession(ResolvedRecipe(recipe, {}, {}, {}), Reporter(True))
    await session.context(TOKENIZER, stage)
    trainer = Trainer(
        recipe, model=tiny(), tokenizer=TOKENIZER, engines=EngineGroup([Player()], tmp_path, 64), tools={}, reward=right,
        writer=SimpleNamespace(run_dir=tmp_path), problems={}, on_step=print,
    )  # fmt: skip
    trainer.context(stage)
    assert {"limits.tool_timeout_s", "limits.tool_truncate_side", "reward_timeout_s"} <= read
    assert [key for key in read if not {key, key.split(".")[0]} & set(SAME_IN_ALL_STAGES)] == []


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_log_prob_mismatch_has_a_default_limit(dtype, limit):
    assert EngineSection(dtype=dtype).mismatch_limit_of() == limit
    assert EngineSection(dtype=dtype, mismatch_limit=0.5).mismatch_limit_of() == 0.5


@pytest.mark.parametrize(
    ("device", "bf16", "installed", "name"),
    [
        ("cuda", True, True, "flash_attention_2"), ("cuda", True, False, "sdpa"), ("cuda", False, True, "sdpa"),
        ("cpu", True, True, "sdpa"),
    ],
)  # fmt: skip
def test_attention_is_flash_attention_where_it_can_run(monkeypatch, device, bf16, installed, name):
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: installed)
    assert attention_implementation(torch.device(device), bf16=bf16) == name


def test_a_job_whose_profile_has_gpus_does_not_train_on_the_cpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert session_module.device().type == "cpu"
    monkeypatch.setenv(EXPECTED_GPUS, "1")
    with pytest.raises(UserError, match="the profile of this job has 1 per node, but torch"):
        session_module.device()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_gpu_that_torch_cannot_use_is_an_error_and_no_run_on_the_cpu(monkeypatch, tmp_path, hidden):
    """An old driver: CUDA is in the build of torch and the device exists, but torch finds no GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(session_module, "GPU_NODES", (tmp_path,))
    monkeypatch.delenv(EXPECTED_GPUS, raising=False)
    if hidden:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert session_module.device().type == "cpu"
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with pytest.raises(UserError, match=r"cannot use it: its driver is missing or too old for CUDA 13\.0"):
            session_module.device()

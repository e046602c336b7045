"""Functions of the user replace parts of the algorithm; the examples of docs/extending.md are run as they are printed."""

import sys
from dataclasses import replace

import pytest
import torch
import yaml
from helpers.own_parts import example_recipe, write_module
from helpers.scripted_engine import ScriptedEngine
from helpers.scripted_training import problem, tiny, train
from helpers.trajectories import BATCH

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.algorithm.objective import Terms, policy_loss, training_loss
from rstar_lab.rl.algorithm.selection import Selection, select_rollouts
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import parse_recipe
from rstar_lab.rl.pipeline import SFT_KEYS
from rstar_lab.rl.plugins import load_function
from rstar_lab.rl.preflight.run import preflight
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import LimitsSection, RecipeError, RlSection
from rstar_lab.rl.renderers.paper import render_tool_call
from rstar_lab.rl.resolved import load_functions, resolve
from rstar_lab.rl.rollout.agent_loop import run_rollout
from rstar_lab.rl.rollout.codec import Codec
from rstar_lab.rl.rollout.context import RolloutContext, RolloutTask
from rstar_lab.rl.scheduling.base import EngineState, TurnRequest
from rstar_lab.rl.scheduling.lengths import LengthPredictor
from rstar_lab.rl.scheduling.policies import make_policy
from rstar_lab.rl.session import RunSession, open_run
from rstar_lab.rl.synthetic.families import synthesize
from rstar_lab.rl.training.data_parallel import HelperProcesses
from rstar_lab.rl.training.update import Learner
from rstar_lab.runs.reader import RunReader
from rstar_lab.verify import verify

GROUPS = [replace(t, group_id=f"g{i // 3}", p_err=i / 10) for i, t in enumerate(BATCH)]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    """Run each test in a folder with my_parts.py, imported anew."""
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    load_function.cache_clear()
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def recipe_of(**keys):
    return parse_recipe({"name": "own", "model": "tiny", **example_recipe(), **keys})


@pytest.mark.slow
def test_all_examples_load_and_preflight_names_them(module):
    assert len(load_functions(recipe_of())) == 9
    (module / "own.yaml").write_text(yaml.safe_dump({"name": "own", "model": "tiny", **example_recipe()}))
    (shown,) = (found for found in preflight("own.yaml", "laptop") if found.check == "own functions")
    assert (
        "rl.method.roc.rule: my_parts:fewest_errors" in shown.message
        and "engine.scheduler: my_parts:RoundRobin" in shown.message
    )
    wrong = {"rl.method.loss": "my_parts:reinforced"}
    (shown,) = (found for found in preflight("own.yaml", "laptop", wrong) if found.check == "own functions")
    assert shown.status == "fail" and "has no reinforced; did you mean reinforce?" in shown.message


@pytest.mark.slow
async def test_a_run_with_every_part_replaced_uses_them(module):
    stages = [{"name": "one", "steps": 6}]
    problems = {"one": [problem("a", 0.5), problem("b", 0.5)]}
    own = example_recipe()["rl"]
    own |= {"mini_batches": 2, "method": own["method"] | {"type": "my_more:advantage"}}
    (module / "my_more.py").write_text(
        "seen = []\n"
        "def advantage(rewards, trajectories):\n    seen.append([t.traj_id for t in trajectories])\n    return rewards * 2 - 1\n"
    )
    _, run = await train(module, stages, problems, **own)
    import my_more

    lines = RunReader(run).metrics()
    assert len(lines) == 6 and all(line["metrics/longest"] > 0 and "corrected_share" in line for line in lines)
    rows = RunReader(run).read("trajectories").to_pylist()
    kept = {row["traj_id"]: row for row in rows if row["kept"]}
    assert set(kept) == {name for step in my_more.seen for name in step}
    assert {row["advantage"] for row in kept.values()} <= {-1.0, 1.0}
    assert len({row["reward"] for row in kept.values()}) == 2


def test_own_loss_and_correction_equal_their_formulas():
    torch.manual_seed(0)
    log_probs, old, engine = (torch.randn(2, 6) for _ in range(3))
    advantages, mask = torch.tensor([[1.0], [-0.5]]).expand(2, 6), torch.rand(2, 6) > 0.3
    config = RlSection(method={"loss": "my_parts:reinforce"}, correction={"type": "my_parts:capped"}).loss_config
    loss, stats = training_loss(log_probs, old, Terms(advantages, mask), config, engine_log_probs=engine)
    weight = (old - engine).exp().clamp(max=3)
    terms = -advantages * (log_probs - old).exp() * weight
    assert float(loss) == pytest.approx(float(terms[mask].sum() / mask.sum()), rel=1e-5)
    assert stats["corrected_share"] == pytest.approx(float(((old - engine).exp() > 3)[mask].float().mean()))
    unclipped, _ = policy_loss(log_probs, old, advantages, mask, clip_low=1e9, clip_high=1e9)
    own, _ = policy_loss(log_probs, old, advantages, mask, variant=config.variant)
    assert float(own) == pytest.approx(float(unclipped), rel=1e-5)


def test_own_rule_penalty_and_advantage_select_the_rollouts():
    rl = RlSection(
        group_size=2,
        method={
            "type": "my_parts:centred",
            "roc": {"rule": "my_parts:fewest_errors", "penalties": ("errors", "my_parts:long")},
        },
    )
    kept = select_rollouts(GROUPS, rl.hooks, seed=0)
    expected = []
    for group in ("g0", "g1"):
        members = [t for t in GROUPS if t.group_id == group]
        expected += sorted(members, key=lambda t: t.p_err + len(t.response_ids) / 8192)[:2]
    assert kept.trajectories == expected
    assert kept.advantages == [t.reward - 0.5 for t in expected]


def test_own_families_make_the_same_problems_again():
    made = synthesize(3, 8, levels=[1, 2], families=["my_parts:sums", "product_remainder"])
    assert made == synthesize(3, 8, levels=[1, 2], families=["my_parts:sums", "product_remainder"])
    own = [p for p in made if p.source == "my_parts:sums"]
    assert len(own) == 4
    for p in own:
        a, b = (int(part) for part in p.question.removeprefix("What is ").rstrip("?").split(" + "))
        assert p.answer == str(a + b)


def test_own_policy_dispatches_the_turns_of_the_simulator():
    policy = make_policy("my_parts:RoundRobin", max_context=100, predictor=LengthPredictor(100))
    for number in range(4):
        policy.ready(TurnRequest(number, "p", 0, 10, 0))
    engines = [EngineState("a", 100), EngineState("b", 100, alive=False), EngineState("c", 100)]
    assert sorted(engine for _, engine in policy.dispatch(engines)) == [0, 0, 2, 2]


@pytest.mark.slow
def test_helper_processes_load_own_losses(module):
    """With two processes, half of the rows are computed in the helper: a loss that reached only one would show."""
    rl = RlSection(
        method={"loss": "my_parts:reinforce"}, correction={"type": "my_parts:capped"}, mini_batches=2, lr=1e-3
    )
    seen = []
    for count in (1, 2):
        learner = Learner(tiny())
        with HelperProcesses(count) as helpers:
            learner.lead(helpers.lead("rstar_lab.rl.training.update:run_update_helper"), rl)
            learner.begin_stage(rl, reset=False, reference=None)
            update = learner.update(Selection.of(GROUPS, [1.0, -0.5, -0.5, 0.7, 0.7, -1.4]), rl, lr_scale=1.0, seed=0)
            learner.dismiss()
        seen.append(update.metrics)
    assert seen[1] == pytest.approx(seen[0], rel=1e-3, abs=1e-5)
    assert 0 < seen[0]["importance_weight"] < 1


def test_an_sft_run_in_another_prompt_format_is_refused():
    def start(prompt_format):
        keys = {"sft": {"problems": {"synthetic": {"count": 1}}}, "rl": {"prompt": {"format": prompt_format}}}
        recipe = parse_recipe({"name": "formats", "model": "tiny", **keys})
        return open_run(RunSession(resolve(recipe), Reporter()), "sft", "train", SFT_KEYS)

    with start("paper"):
        pass
    with pytest.raises(RecipeError, match=r"rl\.prompt\.format: paper then, released now"):
        start("released")
    with pytest.raises(RecipeError, match="sft supports only paper and released"):
        start("model")


async def test_the_same_run_with_another_source_is_refused(module):
    def start():
        return open_run(RunSession(resolve(recipe_of()), Reporter()), "rl", "train", ("rl",))

    with start() as writer:
        run = writer.run_dir
    assert RunReader(run).info["extra"]["functions"]["rl.method.roc.rule"].startswith("my_parts:fewest_errors@")
    with start():
        pass
    (module / "my_parts.py").write_text((module / "my_parts.py").read_text() + "\n# another version\n")
    with pytest.raises(
        RecipeError, match=r"another version of the source file of my_parts:RoundRobin \(.* then, .* now\)"
    ):
        start()


WRONG = {
    "rl.method.roc.rule: my_wrong:rule returned [0, 0]; expected 2 different indices below 3": (
        {"method": {"roc": {"rule": "my_wrong:rule"}}}, "def rule(rewards, penalties, keep, rng):\n    return [0] * keep"),
    "rl.method.roc.rule: my_wrong:rule failed at": (
        {"method": {"roc": {"rule": "my_wrong:rule"}}}, "def rule(rewards, penalties, keep, rng):\n    return 1 / 0"),
    "rl.method.roc.penalties: my_wrong:p returned -1": (
        {"method": {"roc": {"penalties": ("my_wrong:p",)}}}, "def p(trajectory):\n    return -1"),
    "rl.method.type: my_wrong:a returned [nan]; expected": (
        {"method": {"type": "my_wrong:a"}}, "def a(rewards, trajectories):\n    return [float('nan')]"),
    "rl.method.roc.rule: my_wrong:rule is called with (rewards, penalties, keep, rng): too many positional arguments": (
        {"method": {"roc": {"rule": "my_wrong:rule"}}}, "def rule(rewards, keep):\n    return [0]"),
    "my_wrong.py has no rule; did you mean rules?": ({"method": {"roc": {"rule": "my_wrong:rule"}}}, "def rules():\n    pass"),
    "rl.method.roc.rule: my_wrong:rule is a int; expected a function": ({"method": {"roc": {"rule": "my_wrong:rule"}}}, "rule = 3"),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_named_with_their_key(message, module):
    keys, source = WRONG[message]
    (module / "my_wrong.py").write_text(source)
    with pytest.raises(UserError) as error:
        select_rollouts(GROUPS, RlSection(group_size=2, **keys).hooks, seed=0)
    assert message in str(error.value)


async def test_an_own_chat_template_renders_prompts_and_text_between_turns():
    tokenizer = train_tokenizer(["text"], 300)
    tokenizer.chat_template = None
    rl = RlSection(
        prompt={"format": "model", "chat_template": "my_parts:chatml", "system_prompt": "Be brief."}, answer="boxed"
    )
    codec = Codec(tokenizer, {}, rl.prompt_style)
    engine = ScriptedEngine(tokenizer, lambda prompt, turn: [render_tool_call("f", {}), "\\boxed{4}"][turn])
    context = RolloutContext(codec, {}, verify, LimitsSection(max_response_tokens=500), answer_format="boxed")
    task = RolloutTask(Problem(problem_id="p", question="2 + 2?", answer="4"), "t", "g", sample=0, seed=1)
    rollout = await run_rollout(task, engine, context)
    asked = "2 + 2?\n\nPut the final answer in \\boxed{}."
    first = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    response = f"<tool_response>\n{rollout.calls[0].response}\n</tool_response>"
    second = f"<|im_end|>\n<|im_start|>user\n{response}<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(ids) for ids in engine.prompts] == [first, first + render_tool_call("f", {}) + second]
    assert rollout.answer == "4" and rollout.reward == 0.0  # verify reads tagged answers


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("return 1", "rl.prompt.chat_template: my_wrong:t returned int; expected a string"),
        (
            "return messages[0]['text']",
            "rl.prompt.chat_template: my_wrong:t failed at .*my_wrong.py:2: KeyError: 'text'",
        ),
        ("return ''", "rl.prompt.chat_template: my_wrong:t ends a turn without a special token"),
    ],
)
def test_wrong_chat_templates_are_named_with_their_key(source, message, module):
    (module / "my_wrong.py").write_text(f"def t(messages, tools, add_generation_prompt):\n    {source}")
    style = RlSection(prompt={"format": "model", "chat_template": "my_wrong:t"}).prompt_style
    with pytest.raises(UserError, match=message):
        Codec(train_tokenizer(["text"], 300), {}, style)
    with pytest.raises(RecipeError, match=r"rl.prompt.chat_template: not a key of format: paper; it belongs to model"):
        parse_recipe({"model": "tiny", "rl": {"prompt": {"chat_template": "my_wrong:t"}}})


def test_a_loss_of_the_wrong_shape_is_refused(module):
    (module / "my_wrong.py").write_text("def loss(log_probs, old, advantages, mask):\n    return log_probs.sum()")
    config = RlSection(method={"loss": "my_wrong:loss"}).loss_config
    ones = torch.ones(2, 3)
    with pytest.raises(
        UserError, match=r"rl.method.loss: my_wrong:loss returned shape \(\); expected a tensor of shape \(2, 3\)"
    ):
        policy_loss(ones, ones, ones, ones.bool(), variant=config.variant)

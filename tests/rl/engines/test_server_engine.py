"""Tests of the server engine on two real vLLM servers: tokens and log-probs, new weights, hung and killed servers."""

import asyncio
import contextlib
import copy
import math
import signal

import httpx
import pytest
import torch
from helpers.scored_run import RECIPE
from helpers.tiny_models import worst_gap
from helpers.vllm_servers import KEY, wait_until

from rstar_lab.common.errors import UserError
from rstar_lab.common.progress import Reporter
from rstar_lab.rl.engine import FinishReason, RequestRefused, Sampling
from rstar_lab.rl.engines.group import open_engines
from rstar_lab.rl.engines.server import ServerEngine, parse_metrics
from rstar_lab.rl.models.model import load_tokenizer, save_model
from rstar_lab.rl.models.tokenizer import train_tokenizer
from rstar_lab.rl.overrides import load_recipe, parse_recipe
from rstar_lab.rl.pipeline import train
from rstar_lab.rl.problems import Problem
from rstar_lab.rl.recipe import EngineSection, RecipeError
from rstar_lab.rl.resolved import resolve
from rstar_lab.rl.rollout.context import RolloutTask
from rstar_lab.rl.session import RunSession
from rstar_lab.rl.training.teacher import open_servers
from rstar_lab.runs.reader import RunReader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PROMPTS = [[3 + i, 5, 7, 11 + i % 4] for i in range(12)]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RSTAR_LAB_API_KEY", KEY)


def section(served, **keys) -> EngineSection:
    return EngineSection(kind="server", urls=tuple(served.urls), dtype="float32", max_num_seqs=16, **keys)


async def sample(engine, max_tokens=24):
    return await asyncio.gather(*engine.submit([(p, Sampling(max_tokens, 0.8, seed=i)) for i, p in enumerate(PROMPTS)]))


def changed(model, seed: int):
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return other


async def test_servers_return_the_models_log_probs_and_load_new_weights(served, memorized_model, tmp_path):
    folder, model = memorized_model
    async with open_engines(section(served), folder, tmp_path, 512) as group:
        first, second = group.engines
        assert group.loaded_folder == folder and group.context == 512 and first.kv_tokens > 1000
        a, b = await sample(first), await sample(second)
        assert [(c.token_ids, c.log_probs) for c in a] == [(c.token_ids, c.log_probs) for c in b]
        assert max(worst_gap(model, p, c, 0.8) for p, c in zip(PROMPTS, a, strict=True)) < 2e-5
        assert {c.engine for c in a + b} == set(served.urls) and {c.policy_version for c in a} == {0}

        streamed: list[int] = []
        completion = await first.generate(PROMPTS[0], Sampling(24, 0.8, seed=0), streamed.extend)
        assert completion.log_probs == a[0].log_probs
        assert streamed == a[0].token_ids
        stop = a[1].token_ids[3]
        stopped = await first.generate(PROMPTS[1], Sampling(24, 0.8, seed=1, stop_token_ids=(stop,)))
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids == a[1].token_ids[: a[1].token_ids.index(stop) + 1]
        # A response that reaches the model's context ends as with max_tokens.
        assert len((await first.generate([1] * 500, Sampling(100, seed=0))).token_ids) == 12
        full = await first.generate([1] * 512, Sampling(100))
        assert full.token_ids == [] and full.finish_reason is FinishReason.LENGTH
        # After an invalid request the engine is still used.
        with pytest.raises(RequestRefused, match="rejected a request"):
            await first.generate([10**6], Sampling(4))
        assert not first.lost
        metrics = await first.scrape()
        assert metrics.generated_tokens >= sum(len(c.token_ids) for c in a)

        # New weights reach busy servers, and the prefix cache is reset.
        held = first.submit([(p, Sampling(150, 0.8, seed=i)) for i, p in enumerate(PROMPTS)])
        await asyncio.sleep(0.1)
        other = changed(model, 1)
        await group.load(other, 7)
        assert all(done.token_ids for done in await asyncio.gather(*held))
        after = await sample(first)
        assert {c.policy_version for c in after} == {7}
        assert max(worst_gap(other, p, c, 0.8) for p, c in zip(PROMPTS, after, strict=True)) < 2e-5
        # A server that does not use the weights it received is an error.
        first_push = first._push
        first._push = second._push  # type: ignore[method-assign]
        with pytest.raises(
            UserError, match=r"the mean difference of its log-probs to the trainer's is .* \(limit 0.001"
        ):
            await group.load(changed(model, 2), 8)
        first._push = first_push  # type: ignore[method-assign]
        await group.load_folder(folder)
        assert [c.token_ids for c in await sample(second)] == [c.token_ids for c in a]


async def test_an_unusable_url_is_an_error_that_names_the_remedy(served, monkeypatch):
    for url, message in (
        ("http://127.0.0.1:9", r"http://127.0.0.1:9 does not answer \(.+\): start it with `rstar-lab serve MODEL`"),
        (served.urls[0] + "/nowhere", r"/nowhere is not an OpenAI-style server: /v1/models returns status 404"),
    ):
        engine = ServerEngine(url)
        with pytest.raises(UserError, match=message):
            await engine.start()
        await engine.aclose()
    monkeypatch.setenv("RSTAR_LAB_API_KEY", "wrong")
    engine = ServerEngine(served.urls[0])
    with pytest.raises(UserError, match="rejects the token: set RSTAR_LAB_API_KEY"):
        await engine.start()
    for path in ("/metrics", "/collective_rpc", "/pause", "/invocations"):  # vLLM's own --api-key leaves these open
        assert (await engine._http.post(path)).status_code == 401
    assert (await engine._http.get("/health")).status_code == 200
    await engine.aclose()


def test_server_urls_of_a_recipe_are_checked():
    sets = {"engine.kind": "server", "engine.urls": ["http://127.0.0.1:8000"]}
    assert load_recipe("evaluate", sets).engine.urls == ("http://127.0.0.1:8000",)
    for wrong, message in (
        ({"engine.kind": "server"}, "kind: server requires urls, and urls require kind: server"),
        ({"engine.urls": ["http://127.0.0.1:8000"]}, "kind: server requires urls, and urls require kind: server"),
        (sets | {"engine.urls": ["127.0.0.1:8000"]}, "does not begin with http://"),
        ({"engine.teacher_url": "127.0.0.1:8000"}, "teacher_url: '127.0.0.1:8000' does not begin with http://"),
        (sets | {"rl.schedule.lockstep": True}, "lockstep is not supported with engine.kind: server"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe("evaluate", wrong)
    with pytest.raises(RecipeError, match=r"opd requires engine\.teacher_url"):
        load_recipe("tiny", {"rl.method.add": [{"type": "opd", "weight": 1.0}]})


def test_metrics_of_vllm_are_parsed_and_others_return_none():
    text = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 4.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""
    metrics = parse_metrics(text)
    assert metrics and (metrics.preemptions, metrics.kv_tokens) == (4, 1600)
    assert parse_metrics("process_cpu_seconds_total 4.0\n") is None


async def test_training_on_servers_uses_both_and_has_matching_log_probs(served, memorized_model, tmp_path):
    folder, _ = memorized_model
    recipe = parse_recipe(
        RECIPE
        | {
            "model": str(folder),
            "runs": str(tmp_path),
            "rl": RECIPE["rl"] | {"problems_per_step": 4, "schedule": {"lockstep": False}},
            "stages": [RECIPE["stages"][0] | {"steps": 2}],
            "engine": {"kind": "server", "urls": served.urls, "dtype": "float32"},
        }
    )
    async with RunSession.open(resolve(recipe), Reporter(True)) as session:
        await train(session, folder)
        await (await session.engines(folder)).load_folder(folder)
    reader = RunReader(tmp_path / "scored-rl")
    assert reader.status == "finished" and len(reader.steps()) == 2
    rows = reader.read("trajectories").to_pylist()
    assert {(row["step"], row["policy_version"]) for row in rows} == {(1, 0), (2, 1)}
    assert {row["engine"] for row in rows} == set(served.urls)
    # In every step the trainer compares the servers' log-probs with its own.
    kept = [row for row in rows if row["trainer_log_prob"] is not None]
    assert kept and all(abs(row["trainer_log_prob"] - row["engine_log_prob"]) < 1e-4 for row in kept)


async def test_a_server_scores_given_tokens(served, memorized_model):
    _, model = memorized_model
    engine = ServerEngine(served.urls[1])
    await engine.start()
    prompt, response = [3, 5, 7], [11, 200, 17, 4]
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    expected = [float(log_probs[len(prompt) - 1 + i, token]) for i, token in enumerate(response)]
    assert await engine.score(prompt, response) == pytest.approx(expected, abs=1e-4)
    filled = await engine.score([1] * 509, [1] * 3)  # the context has 512 tokens
    assert math.isfinite(filled[0]) and math.isfinite(filled[1]) and math.isnan(filled[2])
    assert all(map(math.isnan, await engine.score([1] * 511, [1])))
    found, rank = await engine.alternatives([*prompt, 11], 200, 3)
    best = log_probs[len(prompt)].topk(3)
    assert (
        list(found)[:3] == best.indices.tolist()
        and rank == int((log_probs[len(prompt)] > expected[1] + 1e-6).sum()) + 1
    )
    assert [found[token] for token in [*best.indices.tolist(), 200]] == pytest.approx(
        [*best.values.tolist(), expected[1]], abs=1e-4
    )
    await engine.aclose()


async def test_an_unfit_teacher_is_an_error(served, memorized_model):
    distilled = {"method": {"add": [{"type": "opd", "weight": 0.1}]}}
    recipe = parse_recipe(
        RECIPE | {"model": str(memorized_model[0]), "engine": {"teacher_url": served.urls[1]}, "rl": distilled}
    )
    tokenizer = load_tokenizer(memorized_model[0])
    async with open_servers([*map(recipe.settings, recipe.stages)], recipe.engine, tokenizer, 512) as servers:
        assert [*servers] == ["teacher"]
    for tokens, own, words in (
        (513, tokenizer, "a context of 512 tokens, rollouts have up to 513"),
        (512, train_tokenizer(["other text"], 290), "another tokenizer"),
    ):
        with pytest.raises(UserError, match=words):
            async with open_servers([*map(recipe.settings, recipe.stages)], recipe.engine, own, tokens):
                pass


async def test_distillation_without_any_reward_approaches_the_teacher(served, memorized_model, tmp_path):
    folder, model = memorized_model
    student = tmp_path / "student"
    save_model(student, changed(model, 5), load_tokenizer(folder))
    recipe = parse_recipe(
        RECIPE
        | {
            "model": str(student),
            "runs": str(tmp_path),
            "rl": RECIPE["rl"]
            | {
                "method": {"add": [{"type": "opd", "weight": 1.0}], "roc": {"rule": "none"}},
                "reward": "verify",
                "warmup_steps": 0,
            },
            "stages": [RECIPE["stages"][0] | {"steps": 6}],
            "engine": {"kind": "transformers", "dtype": "float32", "teacher_url": served.urls[1]},
        }
    )
    async with RunSession.open(resolve(recipe), Reporter(True)) as session:
        await train(session, student)
    lines = RunReader(tmp_path / "scored-rl").metrics()
    assert {line["correct"] for line in lines} == {0.0}
    assert {line["kept"] for line in lines} == {12}
    gaps = [line["teacher_kl"] for line in lines]
    assert gaps[0] > 0 and gaps[-1] < 0.7 * gaps[0], gaps


# The tests below stop servers, so they run last.


async def dispatch(group, count=24, max_tokens=200):
    """Run rollouts of one turn through the scheduler. Returns one list of completions per rollout."""
    problems = [Problem(problem_id=f"p{i}", question="q", answer="a") for i in range(count)]
    tasks = [RolloutTask(problem, f"t{i}", problem.problem_id, 0, i) for i, problem in enumerate(problems)]
    slots = group.slots(tasks, "async")
    completions: list[list] = [[] for _ in tasks]

    async def run(index, task):
        slot = slots(index, task)
        completions[index].append(await slot.generate([5, 7, index % 100], Sampling(max_tokens, 0.8, seed=index)))
        slot.on_turn("", True)
        slot.leave()

    await asyncio.gather(*(run(i, task) for i, task in enumerate(tasks)))
    return completions


async def wait_until_busy(engine, rollouts) -> None:
    while len(engine._in_flight) < 8:
        assert not rollouts.done(), "the rollouts ended before the engine was busy: use more rollouts on this machine"
        await asyncio.sleep(0.005)


async def test_requests_of_hung_and_killed_servers_go_to_the_other(served, memorized_model, tmp_path):
    folder, model = memorized_model
    other = changed(model, 3)
    async with open_engines(section(served, stall_s=5.0), folder, tmp_path, 512) as group:
        first, second = group.engines
        await group.load(other, 4)
        expected = [[c.token_ids for c in each] for each in await dispatch(group, 96)]
        assert all(len(each) == 1 for each in expected)

        # Hung: the connections stay open, but nothing arrives.
        rollouts = asyncio.create_task(dispatch(group, 96))
        await wait_until_busy(first, rollouts)
        served.signal(first.url, signal.SIGSTOP)
        try:
            after = await rollouts
        finally:
            served.signal(first.url, signal.SIGCONT)
        assert [[c.token_ids for c in each] for each in after] == expected
        assert {c.engine for each in after for c in each} >= {second.url}
        assert await asyncio.to_thread(wait_until, lambda: not first.lost, 300)

        # Killed.
        rollouts = asyncio.create_task(dispatch(group, 96))
        await wait_until_busy(first, rollouts)
        served.of(first.url).kill()
        after = await rollouts
        assert [[c.token_ids for c in each] for each in after] == expected
        assert first.lost and not second.lost


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


@pytest.mark.soak
@pytest.mark.parametrize("stop_signal", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_restarted_server_gets_the_newest_weights(served, memorized_model, tmp_path, stop_signal):
    folder, model = memorized_model
    other = changed(model, 3)
    for url in served.urls:
        assert await asyncio.to_thread(wait_until, lambda url=url: healthy(url), 900)
    async with open_engines(section(served, stall_s=5.0), folder, tmp_path, 512) as group:
        first, _ = group.engines
        await group.load(other, 5)
        served.signal(first.url, stop_signal)
        await dispatch(group)
        # `serve` restarts the server with the weights of its folder. It is used after it has the newest weights.
        assert await asyncio.to_thread(wait_until, lambda: not first.lost, 900)
        back = await sample(first)
        assert max(worst_gap(other, p, c, 0.8) for p, c in zip(PROMPTS, back, strict=True)) < 2e-5

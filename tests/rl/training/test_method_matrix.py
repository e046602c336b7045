"""Every pair of methods, with every schedule and correction, against an update in plain torch that shares no code with the
package, or refused with the name of a method."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.scripted_training import TOKENIZER
from helpers.trajectories import trajectory

from rstar_lab.common.outcomes import Outcome
from rstar_lab.rl.models.model import build_tiny
from rstar_lab.rl.recipe import RlSection
from rstar_lab.rl.step import select
from rstar_lab.rl.training.driver import LocalPasses
from rstar_lab.rl.training.group_stream import trim
from rstar_lab.rl.training.update import Learner
from rstar_lab.rl.trajectory import StopReason, ToolCallRecord, Turn

LIMIT, VERSION, LR = 16, 5, 1.0
BASES = ("grpo", "maxrl", "otb", "reinforce_pp")
ADDED = {
    "overlong_filter": {}, "void_turns": {}, "control_tokens": {}, "overlong_buffer": {"tokens": 8},
    "repetition": {"weight": 0.3, "ngram": 2}, "tool_budget": {"weight": 0.4}, "task_normalisation": {}, "echo": {"weight": 0.2},
    "opd": {"weight": 0.1}, "sdpo": {"weight": 0.2},
}  # fmt: skip
PAIRS = [*((name,) for name in ADDED), *itertools.combinations(ADDED, 2)]
SCHEDULES = {
    "sync": {"type": "sync"},
    "one_step_off": {"type": "one_step_off", "allow_uncorrected": True},
    "trim": {"type": "async", "when_stale": "trim", "max_staleness": 1, "allow_uncorrected": True},
}
CORRECTIONS = ("none", "tis")
# Each pair meets every base, and over the bases every schedule and correction.
CASES = [
    (base, pair, [*SCHEDULES][(i + j) % 3], CORRECTIONS[(i // 3 + j) % 2], 1 + (i + j // 2) % 2)
    for i, pair in enumerate(PAIRS)
    for j, base in enumerate(BASES)
]
REFUSED = {("otb", "task_normalisation"), ("opd", "sdpo")} | {(base, "tool_budget") for base in BASES if base != "grpo"}


def rollouts():
    """Return four groups of four rollouts, one with equal rewards, with all properties that methods read."""
    rng = np.random.default_rng(0)
    rewards = ([1, 0, 0, 1], [1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0])
    found = []
    for number, sample in itertools.product(range(4), range(4)):
        size = int(rng.integers(8, LIMIT + 1))
        t = trajectory(10 * number + sample, 4, size)
        cut = size // 2
        ids = [int(i) % 20 for i in t.response_ids]
        mask = [True] * cut + [False] * 2 + [True] * (size - cut - 2)
        odd = rng.random(3) < 0.25
        turns = (
            Turn(
                0,
                cut,
                "",
                0,
                0,
                0,
                ((VERSION - 3, 2), (VERSION, cut - 2)),
                void=bool(odd[0]),
                outputs=((cut, cut + 1),),
            ),
            Turn(cut + 2, size, "", 0, 0, 0, ((VERSION, size - cut - 2),), control_token=bool(odd[1])),
        )
        outcome = Outcome.EXCEPTION if rng.random() < 0.3 else Outcome.OK
        calls = tuple(
            ToolCallRecord(0, i, "python", "", outcome, "", 0, 0, cut) for i in range(int(rng.integers(0, 3)))
        )
        found.append(
            replace(
                t, traj_id=f"{number}-{sample}", group_id=f"g{number}", problem_id=f"p{number}", sample=sample, turns=turns,
                calls=calls, response_ids=ids, loss_mask=mask, reward=float(rewards[number][sample]), policy_version=VERSION,
                log_probs=rng.normal(-5.5, 0.5, size).tolist(), stop_reason=StopReason.LENGTH if odd[2] else StopReason.ANSWERED,
            )
        )  # fmt: skip
    return found


ROLLOUTS = rollouts()
EXTRA = [3, 1, 4, 1, 5]  # prompt with a demonstration


def teacher(t):
    return np.sin(np.asarray(t.response_ids, np.float32)) - 4


class Passes(LocalPasses):
    async def teacher_log_probs(self, rollouts):
        return [teacher(t) for t in rollouts]

    def prompt_ids(self, rollout, question):
        return EXTRA


def make_model():
    return build_tiny(TOKENIZER, seed=1, hidden_size=16, layers=1, heads=2, kv_heads=1)


def log_softmax(model, prompt, response):
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1)


def sampled(model, t, prompt=None):
    """Return the log-prob of each token of a response."""
    table = log_softmax(model, prompt or t.prompt_ids, t.response_ids)
    return table.gather(1, torch.tensor(t.response_ids)[:, None])[:, 0]


# The reference


def repeated(t):
    windows = [tuple(t.response_ids[k : k + 2]) for turn in t.turns for k in range(turn.start, turn.end - 1)]
    return 1 - len(set(windows)) / len(windows)


def reference(model, base, added, schedule, correction, parts):
    """Return the parameters after the update, as one vector."""
    groups = [ROLLOUTS[k : k + 4] for k in range(0, 16, 4)]
    trains_equal = base == "reinforce_pp" or "opd" in added
    in_policy = [g for g in groups if len({t.reward for t in g}) > 1 or trains_equal]
    equal = [g for g in groups if g not in in_policy] if "echo" in added else []
    shaped = {
        t.traj_id: t.reward
        - ("overlong_buffer" in added) * min(max((len(t.response_ids) - (LIMIT - 8)) / 8, 0), 1)
        - 0.3 * ("repetition" in added) * repeated(t)
        for g in groups
        for t in g
    }
    with torch.no_grad():
        tables = {t.traj_id: log_softmax(model, t.prompt_ids, t.response_ids) for t in ROLLOUTS}
        old = {t.traj_id: sampled(model, t) for t in ROLLOUTS}
    masks = {t.traj_id: torch.tensor(t.loss_mask) for t in ROLLOUTS}
    advantage = {}  # array per token
    for g in in_policy:
        r = np.array([shaped[t.traj_id] for t in g])
        plain = np.array([t.reward for t in g])
        centred = r - r.mean()
        values = {
            "grpo": centred / (r.std(ddof=1) + 1e-6),
            "maxrl": centred / plain.mean() if plain.mean() else 0 * r,
            "otb": centred, "reinforce_pp": centred,
        }[base]  # fmt: skip
        if "tool_budget" in added and plain.mean() >= 0.5:
            cost = 0.4 * np.sin(np.pi / 2 * np.minimum([len(t.calls) / 10 for t in g], 1)) * (plain > 0)
            moved = (r - cost - (r - cost).mean()) / ((r - cost).std(ddof=1) + 1e-6)
            values = values + np.clip(moved - values, -abs(values) / 2, abs(values) / 2)
        rows = [np.full(len(t.response_ids), value) for t, value in zip(g, values, strict=True)]
        if base == "otb":
            sums = []
            for t in g:
                p = tables[t.traj_id].exp()
                energy = 1 - 2 * old[t.traj_id].exp() + (p**2).sum(-1)
                sums.append(np.cumsum(energy[masks[t.traj_id]].numpy().astype(float)))
            for k, t in enumerate(g):
                own = np.zeros(len(t.response_ids))
                for n, place in enumerate(np.flatnonzero(masks[t.traj_id].numpy())):
                    there = [i for i in range(4) if len(sums[i]) > n]
                    weights = np.array([sums[i][n] for i in there])
                    mean = weights @ centred[there] / (weights.sum() + 1e-8) if len(there) > 1 else 0.0
                    own[place] = centred[k] - mean
                rows[k] = own
        advantage |= {t.traj_id: row for t, row in zip(g, rows, strict=True)}
    whole = lambda: np.concatenate([advantage[n][masks[n].numpy()] for n in advantage])  # noqa: E731
    if base == "reinforce_pp":
        mean, std = whole().mean(), whole().std()
        advantage = {n: (row - mean) / (std + 1e-6) for n, row in advantage.items()}
    if "task_normalisation" in added:
        mean, std = whole().mean(), whole().std()
        advantage = {n: (row - mean) / (std + 1e-6) for n, row in advantage.items()}
    kept = [t for g in groups if g in in_policy or g in equal for t in g]
    if "overlong_filter" in added:
        kept = [t for t in kept if t.stop_reason is not StopReason.LENGTH]
    if "void_turns" in added:
        kept = [t for t in kept if not t.turns[0].void]
    if "control_tokens" in added:
        kept = [t for t in kept if not t.turns[1].control_token]
    policy = {}  # tokens in the policy loss
    for t in kept:
        mask = masks[t.traj_id].clone()
        if schedule == "trim":
            mask[:2] = False  # tokens of a stale version
        policy[t.traj_id] = mask & (t.traj_id in advantage)
    with torch.no_grad():
        for t in kept:
            other = torch.tensor(teacher(t)) if "opd" in added else None
            siblings = [s for s in ROLLOUTS if s.group_id == t.group_id and s.reward > 0]
            clean = any(all(call.outcome is Outcome.OK for call in s.calls) for s in siblings)
            if "sdpo" in added and t.reward <= 0 and clean:
                other = sampled(model, t, EXTRA)
            if other is not None and t.traj_id in advantage:
                weight = 0.1 if "opd" in added else 0.2
                advantage[t.traj_id] = advantage[t.traj_id] + weight * (other - old[t.traj_id]).numpy()
    main = [t for t in kept if policy[t.traj_id].any()] or kept
    sizes = np.linspace(0, len(main), min(parts, len(main)) + 1).astype(int)
    batches = [main[a:b] for a, b in itertools.pairwise(sizes)]
    for t in kept:
        if t not in main:
            min(batches, key=len).append(t)
    for batch in batches:
        count = max(1, sum(int(policy[t.traj_id].sum()) for t in batch))
        outputs = max(1, len(batch))
        loss = torch.zeros(())
        for t in batch:
            new, before, mask = sampled(model, t), old[t.traj_id], policy[t.traj_id]
            a = torch.tensor(advantage.get(t.traj_id, np.zeros(len(mask))), dtype=torch.float32)
            ratio = (new - before).exp()
            terms = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
            if correction == "tis":
                terms = terms * (before - torch.tensor(t.log_probs)).exp().clamp(max=2.0)
            loss = loss + terms[mask].sum() / count
            if "echo" in added:
                start = t.turns[0].outputs[0][0]
                loss = loss - 0.2 * new[start] / outputs
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= LR * parameter.grad
    return torch.cat([p.detach().flatten() for p in model.parameters()])


async def ours(model, rl, schedule):
    learner = Learner(model)
    learner.begin_stage(rl, reset=False, reference=None)
    learner.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    selection = select(ROLLOUTS, rl, seed=0)
    if schedule == "trim":
        selection, _ = trim(selection, lambda version: version < VERSION - 1)
    passes = Passes(learner, rl, None, None)
    for method in rl.hooks:
        if method.forward_phase is not None:
            selection = await method.forward(selection, ROLLOUTS, passes)
    learner.update(selection, rl, lr_scale=1.0, seed=0)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.slow
async def test_every_pair_of_methods_equals_plain_torch_or_is_refused():
    wrong = []
    for base, added, schedule, correction, parts in CASES:
        options = {
            "method": {"type": base, "roc": {"rule": "none"}, "add": [{"type": name} | ADDED[name] for name in added]},
            "schedule": SCHEDULES[schedule], "correction": {"type": correction}, "mini_batches": parts, "precision": "fp32", "lr": LR,
            "max_grad_norm": 1e9, "group_size": 4, "limits": {"max_response_tokens": LIMIT, "max_turns": 10},
        }  # fmt: skip
        case = (base, added, schedule, correction, parts)
        if any(set(pair) <= {base, *added} for pair in REFUSED):
            with pytest.raises(ValueError, match="|".join(added)):
                RlSection(**options)
            continue
        rl = RlSection(**options)
        found = await ours(make_model(), rl, schedule)
        start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
        wanted = reference(make_model(), base, added, schedule, correction, parts)
        size = float((wanted - start).norm())
        if not float((found - wanted).norm()) <= 1e-4 * size or not size:
            wrong.append((case, float((found - wanted).norm()) / max(size, 1e-12)))
    assert wrong == []

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which rollout goes to which engine, and when
#
# Generation is most of a step. This notebook replays one step under each scheduling policy in a simulator of vLLM engines:
# the policies are the objects that real runs use, the engines are a model of vLLM (see `docs/scheduler.md`).
#
# | policy | rule |
# |---|---|
# | `turn-barrier` | rollouts split over the engines beforehand; the next turn waits for the slowest tool of this one |
# | `static` | the same split, every turn sent at once |
# | `least-in-flight` | the first turn goes where fewest requests are in flight, later turns follow it |
# | `kv` | as many rollouts as the KV cache holds at the maximum length, refilled as they end |
# | `adaptive` | as many as the KV cache is expected to hold, longest first, work kept even |

# %% tags=["parameters"]
run = ""  # folder of a run whose step is replayed; empty: a made-up step
step = 0
engines = 8
rollouts = 256  # an engine, in a made-up step
kv_tokens = 125_000  # of an engine
mean_tokens = 3000
tool_s = 0.3
grid_engines = 4  # size of the grid at the end; the reference is 64
calibration = ""  # JSON file of `python -m rstar_lab.rl.bench.calibration`; empty: the record in the package
remeasure = False  # start two vLLM servers here and measure again (minutes)

# %%
import pandas as pd

from rstar_lab.analysis import LinkedFigure
from rstar_lab.rl.bench.scheduler import QWEN3_14B_MI300X, Regime, make_policies, make_rollouts, makespans
from rstar_lab.rl.bench.calibration import calibrate, disagreements, recorded_measurements
from rstar_lab.rl.scheduling.recorded import recorded_rollouts
from rstar_lab.rl.scheduling.figures import plot_gantt, plot_turns, table
from rstar_lab.rl.bench.figures import plot_calibration
from rstar_lab.rl.scheduling.simulator import lower_bound, simulate
from rstar_lab.rl.scheduling.simulated_engine import EngineSpec

# %% [markdown]
# ## The step
#
# Recorded: turns, tokens and tool times as they were. Made up: lognormal lengths (sigma 0.8, cut at 12,288), half of the
# variance of the log explained by the problem, 1 to 10 turns.

# %%
regime = Regime(engines=engines, rollouts=rollouts, kv_tokens=kv_tokens, mean_tokens=mean_tokens, tool_s=tool_s)
script, history = (recorded_rollouts(run, step), None) if run else make_rollouts(regime, seed=0)
pd.DataFrame(
    {
        "tokens": [rollout.generated for rollout in script],
        "turns": [len(rollout.turns) for rollout in script],
        "tool seconds": [sum(turn.tool_s for turn in rollout.turns) for rollout in script],
    }
).describe().round(1)

# %% [markdown]
# ## Every policy on it
#
# The lower bound is the larger of two times: the longest rollout alone on an idle engine, its tools included; and all work
# over all engines at the best batch that the KV cache allows.

# %%
specs = [EngineSpec(QWEN3_14B_MI300X, kv_tokens)] * engines
bound_s = lower_bound(script, specs)
results = {name: simulate(script, policy(), specs, spans=True) for name, policy in make_policies(regime, history).items()}
summary = table(results, bound_s)
summary.round(3)

# %%
LinkedFigure(plot_gantt(results, bound_s), None)

# %% [markdown]
# One engine from close by: under `least-in-flight` all its rollouts are sent at once and queue inside the engine, where a
# full cache costs them their prefixes; under `adaptive` they wait outside until there is room.

# %%
LinkedFigure(plot_turns(results["least-in-flight"], engine=0), None)

# %%
LinkedFigure(plot_turns(results["adaptive"], engine=0), None)

# %% [markdown]
# ## Does it hold elsewhere?
#
# Makespans over that of `least-in-flight`: below 1 is faster. Admission at the maximum length (`kv`) is the rule of the
# paper: it never preempts, and it leaves most of the cache empty, because few rollouts reach the maximum and none starts
# there.

# %%
rows = []
for tokens in (125_000, 800_000):
    for mean in (1000, 3000, 6000):
        times = makespans(Regime(engines=grid_engines, kv_tokens=tokens, mean_tokens=mean, tool_s=tool_s), seed=0)
        rows.append({"kv_tokens": tokens, "mean_tokens": mean} | {k: v / times["least-in-flight"] for k, v in times.items()})
pd.DataFrame(rows).set_index(["kv_tokens", "mean_tokens"]).round(2)

# %% [markdown]
# ## Is the simulator right?
#
# Two real vLLM servers with a tiny model, each on a CPU core of its own, a KV cache small enough to preempt, the same
# scripted rollouts through the real rollout driver. The rates of the simulator are fitted to probes, not to these runs.

# %%
if remeasure:
    rates, measured = await calibrate(rounds=1, progress=print)
else:
    measured = recorded_measurements(calibration)
wrong = disagreements(measured)
print("pairs ranked differently:", wrong or "none")
LinkedFigure(plot_calibration(measured), None)

# %%
pd.DataFrame(
    [
        {
            "policy": m.policy,
            "predicted_s": m.predicted_s,
            "measured_s": m.measured,
            "predicted preemptions": m.predicted_preemptions,
            "measured preemptions": sum(m.measured_preemptions) / len(m.measured_preemptions),
        }
        for m in measured
    ]
).set_index("policy").sort_values("predicted_s").round(1)

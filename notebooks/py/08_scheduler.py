# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py//py:percent
#     notebook_metadata_filter: -kernelspec,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
# ---

# %% [markdown]
# # Dispatch policies: which rollout runs on which engine, and when
#
# **You learn** how the dispatch policies place rollouts, and what a step costs on GPUs. **Time**: 10 minutes to read;
# the cells run in a minute. The simulator is in the repository, not in an installed package.
#
# Generation takes most of the time of a step. This notebook replays one step under each dispatch policy in a simulator. The
# policies are those of real runs; the engines are a model of vLLM (see [docs/scheduler.md](../docs/scheduler.md)).
#
# | policy | rule |
# |---|---|
# | `turn-barrier` | rollouts are split over the engines in advance; a turn starts when all rollouts of the engine have finished the previous one |
# | `static` | the same split; every turn is sent at once |
# | `least-in-flight` | the first turn goes to the engine with the fewest requests in flight; later turns follow it |
# | `kv` | an engine gets as many rollouts as its KV cache holds at the maximum length |
# | `adaptive` | an engine gets as many rollouts as its KV cache is expected to hold, longest first, with balanced work |

# %% tags=["parameters"]
run: str = ""  # folder of a run whose step is replayed; empty: a synthetic step
step: int = 0  # step of that run
engines: int = 8  # number of engines
rollouts: int = 256  # per engine, in a synthetic step
kv_tokens: int = 125_000  # KV cache of an engine
mean_tokens: int = 3000  # mean length of a rollout, in a synthetic step
tool_s: float = 0.3  # mean seconds of a tool call, in a synthetic step
grid_engines: int = 4  # size of the grid at the end; the reference is 64
calibration: str = ""  # JSON file of `python -m benchmarks.calibration`; empty: the recorded results
plan_recipe: str = "qwen3_14b_mi300x"  # recipe and profile of the predicted steps at the end
plan_profile: str = "mi300x_8x8"  # hardware of the predicted steps
remeasure: bool = False  # start two vLLM servers here and measure again (minutes)

# %%
from pathlib import Path

import pandas as pd
from IPython.display import display

from rstar_lab.analysis import LinkedFigure, open_runs
from rstar_lab.analysis.timeline import plot_staleness
from rstar_lab.hardware.profiles import load_profile
from rstar_lab.common.parameters import check_parameters
from rstar_lab.common.resources import load_benchmark
from rstar_lab.rl.overrides import load_recipe
from rstar_lab.runs import RunReader

study = load_benchmark("calibration")  # makes the folder `benchmarks` importable; it is in the repository only
from benchmarks.plan import make_plan, plot_plan
from benchmarks.scheduler_figures import plot_gantt, plot_turns, table
from benchmarks.simulated_engine import EngineSpec
from benchmarks.simulator import lower_bound, simulate
from benchmarks.workloads import QWEN3_14B_MI300X, Regime, make_policies, make_rollouts, makespans, recorded_rollouts

check_parameters(globals())
planned, plan_hardware = load_recipe(plan_recipe, {}), load_profile(plan_profile)

# %% [markdown]
# ## The step
#
# A recorded step uses the turns, tokens and tool times of the run. A synthetic step has lognormal response lengths (sigma 0.8,
# at most 12,288 tokens) and 1 to 10 turns; half of the variance of the log length is between problems.

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
# ## Compare the policies
#
# The lower bound is the larger of two times: the longest rollout alone on an idle engine, including its tools; and the total
# work divided by the engines, at the largest batch that the KV cache allows.

# %%
specs = [EngineSpec(QWEN3_14B_MI300X, kv_tokens)] * engines
bound_s = lower_bound(script, specs)
results = {name: simulate(script, policy(), specs, spans=True) for name, policy in make_policies(regime, history).items()}
summary = table(results, bound_s)
summary.round(3)

# %%
LinkedFigure(plot_gantt(results, bound_s), None)

# %% [markdown]
# The turns of one engine. Under `least-in-flight`, all rollouts are sent at once and queue in the engine; when the KV cache
# is full, cached prefixes are evicted. Under `adaptive`, rollouts wait outside of the engine until the cache has room.

# %%
LinkedFigure(plot_turns(results["least-in-flight"], engine=0), None)

# %%
LinkedFigure(plot_turns(results["adaptive"], engine=0), None)

# %% [markdown]
# ## Other lengths and cache sizes
#
# Makespans relative to `least-in-flight`; below 1 is faster. `kv`, admission at the maximum length, is the rule of the paper.
# It never preempts, but leaves most of the cache empty, because few rollouts reach the maximum length.

# %%
rows = []
for tokens in (125_000, 800_000):
    for mean in (1000, 3000, 6000):
        times = makespans(Regime(engines=grid_engines, kv_tokens=tokens, mean_tokens=mean, tool_s=tool_s), seed=0)
        rows.append({"kv_tokens": tokens, "mean_tokens": mean} | {k: v / times["least-in-flight"] for k, v in times.items()})
pd.DataFrame(rows).set_index(["kv_tokens", "mean_tokens"]).round(2)

# %% [markdown]
# ## Accuracy of the simulator
#
# The same scripted rollouts on two real vLLM servers, with the real rollout driver. Each server runs a tiny model on its own
# CPU core, with a KV cache small enough to preempt. The rates of the simulator are fitted to separate measurements.

# %%
if remeasure:
    rates, measured = await study.calibrate(rounds=1, progress=print)
else:
    measured = study.recorded_measurements(calibration)
wrong = study.disagreements(measured)
print("pairs ranked differently:", wrong or "none")
LinkedFigure(load_benchmark("figures").plot_calibration(measured), None)

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

# %% [markdown]
# ## Whole steps: generation and update at the same time
#
# `rstar-lab plan` simulates whole steps: generation, tools, update and weight sync. The trainer's own code decides when groups
# start and which an update takes, so the modes `sync`, `one_step_off` and `async` can be compared for every split of the GPUs
# (see [docs/async.md](../docs/async.md)). These are predictions from formulas, not measurements.

# %%
LinkedFigure(plot_plan(make_plan(planned, plan_hardware)), None)

# %% [markdown]
# Staleness and idle time of a recorded run in mode `one_step_off` or `async`; the last panel shows whether long and hard
# problems were starved.

# %%
recorded = Path(run) if run else None
if recorded and any("staleness_mean" in line for line in RunReader(recorded).metrics()):
    display(LinkedFigure(plot_staleness(open_runs(recorded.parent, run_ids=[recorded.name]), recorded.name), None))
else:
    print("set `run` to the folder of an asynchronous run")

# %% [markdown]
# ## Next steps
#
# - `12_async` trains in the modes that this notebook predicts.
# - [docs/scheduler.md](../docs/scheduler.md) describes the policies and how the simulator was calibrated.

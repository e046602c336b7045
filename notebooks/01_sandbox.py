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
# # A sandbox for code that a model wrote
#
# Call it, break it, load it. Everything runs on this machine, in isolated processes: no server to start, no Redis.

# %% tags=["parameters"]
calls = 400  # of the load further down
in_flight = 32  # of them at a time
time_limit_s = 2.0  # CPU seconds a call may use

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.sandbox import Call, Limits, LocalSandbox, SandboxClient

sandbox = LocalSandbox(Limits(timeout_s=time_limit_s))
await sandbox.start()

# %% [markdown]
# ## Call it
#
# A call has an **outcome**, what it wrote, and, like a notebook cell, the value of its last expression.

# %%
await sandbox.run("name = input()\nprint('hello', name)\nlen(name)", stdin="world")

# %% [markdown]
# A traceback keeps the program's own line numbers, so a model can mend its code.

# %%
print((await sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")).stderr)

# %% [markdown]
# Every call draws fresh random numbers; a seed makes it reproducible.

# %%
dice = "import random\n[random.randint(1, 6) for _ in range(5)]"
[(await sandbox.run(dice)).value, (await sandbox.run(dice)).value, (await sandbox.run(dice, seed=7)).value]

# %% [markdown]
# A **session** is a live interpreter that remembers, for tools that work as a notebook does.

# %%
await sandbox.run("import sympy as sp\nx = sp.symbols('x')\np = x**2 - 5*x + 6", session="tour")
(await sandbox.run("sp.factor(p)", session="tour")).value

# %% [markdown]
# ## Break it
#
# Each of these runs beside the others. The outcome is observed, never read from the text that a program prints.

# %%
attacks = {
    "never ends": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "hangs in C": "9**9**8",
    "wants 20 GB": "x = bytearray(20 * 2**30)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "writes for ever": "while True: print('spam' * 1000)",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "reads the host": "print(open('/etc/shadow').read())",
    "calls home": "import socket\nsocket.create_connection(('1.1.1.1', 80))",
    "looks around": "import os\nprint(sorted(os.environ), os.listdir('/proc')[:3], os.getuid())",
    "no Python": "for i in range(3) print(i)",
}
results = await sandbox.run_many([Call(code) for code in attacks.values()])
last_words = [result.stderr.strip().splitlines()[-1:] or [result.stdout.strip()[:80]] for result in results]
pd.DataFrame(
    {
        "outcome": [str(result.outcome) for result in results],
        "seconds": [round(result.duration_s, 2) for result in results],
        "last words": [words[0][:80] for words in last_words],
    },
    index=list(attacks),
)

# %% [markdown]
# And the sandbox is as it was:

# %%
await sandbox.run("print('still here')")

# %% [markdown]
# Which layers hold the boundary on this machine: `rstar-lab sandbox check`. They share the host's kernel: a boundary
# against what a model writes, not against an exploit of the kernel.

# %%
sandbox.missing_layers or "nothing is missing"

# %% [markdown]
# ## Load it
#
# What a rollout sends, roughly: most programs are short, some import numpy or sympy, a few fail, 2% never end.

# %%
from rstar_lab.analysis import LinkedFigure
from rstar_lab.sandbox.bench import MIX, mixed
from rstar_lab.sandbox.figures import plot_load, plot_outcomes
from rstar_lab.sandbox.load_generator import run_load

kinds = dict(zip((code for code, _ in MIX), ("short", "numpy", "sympy", "fails", "never ends"), strict=True))
load = [(kinds[code], code) for code in mixed(calls)]

live = None
async for samples in run_load(sandbox, load, in_flight=in_flight):
    if samples and live is None:
        live = LinkedFigure(plot_load(samples), None)
        display(live)
    elif samples:
        live.update_figure(plot_load(samples))

# %%
LinkedFigure(plot_outcomes(samples), None)

# %%
frame = pd.DataFrame(samples)
frame.groupby("kind")[["latency_s", "queue_s", "duration_s"]].quantile([0.5, 0.99]).unstack().round(3)

# %% [markdown]
# Programs that never end step aside after a moment, and the short ones pass: compare the columns above.
#
# ## How many cores does a training step need?
#
# The paper's step makes 45,000 calls at a mean of 0.3 s. If they all come at once:

# %%
from rstar_lab.sandbox.sizing import MIX as COSTS
from rstar_lab.sandbox.sizing import cores_for_burst, draw_service_s, mean_cpu_ms, simulate

cpu_ms = mean_cpu_ms(COSTS)
cores = cores_for_burst(45_000, 0.3, cpu_ms)
latencies = simulate(pd.Series(0.0, range(45_000)).to_numpy(), draw_service_s(45_000, COSTS), cores)
print(f"{cpu_ms:.1f} CPU ms a call: {cores} cores; simulated: mean {latencies.mean():.2f} s, last {latencies.max():.2f} s")

# %% [markdown]
# `docs/sandbox.md` says what these costs were measured on, and what to do with fewer cores.
#
# ## The same, over HTTP
#
# `rstar-lab sandbox serve` is a service; with `--redis`, workers on any number of nodes stand behind it. The client has
# the sandbox's own interface.

# %%
from rstar_lab.sandbox.launch import serving

with serving("serve", "--port", "0", "--time-limit", str(time_limit_s)) as service:
    async with SandboxClient(service["url"]) as client:
        print(service["url"], (await client.run("6 * 7")).value)

# %%
await sandbox.aclose()

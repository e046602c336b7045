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
# # Run model-written code in a sandbox
#
# **You learn** how to run model-written code, what the sandbox stops, and how fast it is. **Time**: 5 minutes; it needs
# no run.
#
# Run programs, try attacks, and measure latency under load. Everything runs in isolated processes on this machine, without a
# server or Redis.

# %% tags=["parameters"]
calls: int = 400  # number of calls in the load
in_flight: int = 32  # concurrent calls
time_limit_s: float = 2.0  # CPU seconds per call

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.common.parameters import check_parameters
from rstar_lab.sandbox import Call, Limits, LocalSandbox, SandboxClient

check_parameters(globals())
sandbox = LocalSandbox(Limits(timeout_s=time_limit_s))
await sandbox.start()

# %% [markdown]
# ## Run a program
#
# A result has an **outcome**, the output, and, like a notebook cell, the value of the last expression.

# %%
await sandbox.run("name = input()\nprint('hello', name)\nlen(name)", stdin="world")

# %% [markdown]
# A traceback has the line numbers of the program, so that a model can correct its code.

# %%
print((await sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")).stderr)

# %% [markdown]
# Random numbers differ between calls; a seed makes a call reproducible.

# %%
dice = "import random\n[random.randint(1, 6) for _ in range(5)]"
[(await sandbox.run(dice)).value, (await sandbox.run(dice)).value, (await sandbox.run(dice, seed=7)).value]

# %% [markdown]
# A **session** is an interpreter that keeps its state between calls, for tools that work like a notebook.

# %%
await sandbox.run("import sympy as sp\nx = sp.symbols('x')\np = x**2 - 5*x + 6", session="tour")
(await sandbox.run("sp.factor(p)", session="tour")).value

# %% [markdown]
# ## Try attacks
#
# These programs run concurrently. The outcome comes from the kernel, never from the text that a program prints.

# %%
attacks = {
    "never ends": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "hangs in C": "9**9**8",
    "allocates 20 GB": "x = bytearray(20 * 2**30)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "endless output": "while True: print('spam' * 1000)",
    "kills all processes": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "reads a host file": "print(open('/etc/shadow').read())",
    "opens a connection": "import socket\nsocket.create_connection(('1.1.1.1', 80))",
    "lists its environment": "import os\nprint(sorted(os.environ), os.listdir('/proc')[:3], os.getuid())",
    "syntax error": "for i in range(3) print(i)",
}
results = await sandbox.run_many([Call(code) for code in attacks.values()])
last_lines = [result.stderr.strip().splitlines()[-1:] or [result.stdout.strip()[:80]] for result in results]
pd.DataFrame(
    {
        "outcome": [str(result.outcome) for result in results],
        "seconds": [round(result.duration_s, 2) for result in results],
        "last line": [words[0][:80] for words in last_lines],
    },
    index=list(attacks),
)

# %% [markdown]
# The sandbox still works after the attacks:

# %%
await sandbox.run("print('still here')")

# %% [markdown]
# `rstar-lab sandbox check` prints which isolation layers this machine supports. Programs share the host's kernel: the sandbox
# isolates model-written code, but does not stop an exploit of the kernel.

# %%
sandbox.missing_layers or "no layer is missing"

# %% [markdown]
# ## Measure latency under load
#
# A mix of calls as in a rollout: most programs are short, some import numpy or sympy, a few fail, and 2% never end.

# %%
import asyncio
import random
import time

import plotly.express as px

from rstar_lab.analysis import LinkedFigure

programs = {
    "short": ("print(1 + 1)", 0.70),
    "numpy": ("import numpy as np\nprint(np.arange(1000).sum())", 0.15),
    "sympy": ("import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))", 0.10),
    "fails": ("print(1/0)", 0.03),
    "never ends": ("while True: pass", 0.02),
}
load = [kind for kind, (_, share) in programs.items() for _ in range(round(share * calls))]
random.Random(0).shuffle(load)
slots, samples, began = asyncio.Semaphore(in_flight), [], time.monotonic()


async def call(kind):
    async with slots:
        asked = time.monotonic()
        result = await sandbox.run(programs[kind][0])
    now = time.monotonic()
    samples.append({"kind": kind, "outcome": str(result.outcome), "at_s": now - began, "latency_s": now - asked, "queue_s": result.queue_s, "duration_s": result.duration_s})


await asyncio.gather(*(call(kind) for kind in load))
frame = pd.DataFrame(samples)
LinkedFigure(px.scatter(frame, x="at_s", y="latency_s", color="kind", symbol="outcome", log_y=True, labels={"at_s": "seconds since the start", "latency_s": "latency (s)"}).update_yaxes(dtick="D2"), None)

# %%
frame.groupby("kind")[["latency_s", "queue_s", "duration_s"]].quantile([0.5, 0.99]).unstack().round(3)

# %% [markdown]
# Short programs preempt endless ones, so they stay fast: compare the rows above.
#
# ## Number of cores for a training step
#
# A step in the paper makes 45,000 calls with a mean latency of 0.3 s. If all arrive at once:

# %%
cpu_ms = 0.72 * 3.1 + 0.16 * 4.2 + 0.12 * 15.0  # short, numpy and sympy programs
# On c cores, the k-th of n calls ends after about k * cpu / c, so the mean latency is n * cpu / (2 c).
cores = 45_000 * cpu_ms / 1000 / (2 * 0.3)
print(f"{cpu_ms:.1f} CPU ms per call: {cores:.0f} cores")

# %% [markdown]
# [docs/sandbox.md](../docs/sandbox.md) describes the machine on which these costs were measured.
#
# ## Use it over HTTP
#
# `rstar-lab sandbox serve` is a service. With `--redis` it uses workers on any number of nodes. The client has the interface
# of LocalSandbox.

# %%
from rstar_lab.sandbox.launch import serving

with serving("serve", "--port", "0", "--time-limit", str(time_limit_s)) as service:
    async with SandboxClient(service["url"]) as client:
        print(service["url"], (await client.run("6 * 7")).value)

# %%
await sandbox.aclose()

# %% [markdown]
# ## Next steps
#
# - [11_own_tools](11_own_tools.ipynb) gives the model a tool of your own.
# - [05_inspect](05_inspect.ipynb) shows the calls of a training run and where they fail.

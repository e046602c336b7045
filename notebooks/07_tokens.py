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
# # Tokens: where the policy hesitates
#
# Most tokens are foregone conclusions. The paper looks at the others, the fifth with the highest entropy, and finds two
# kinds that matter: **forking tokens**, where the model explores or doubts by itself, and **reflection tokens**, which
# follow the answer of a tool: checking a result, or finding out what went wrong. Here both are told apart by where they
# stand (before any tool response, after one that went well, after an error) and by words. Code inside a tool call is
# counted apart, since it is usually low in entropy.
#
# It needs runs that keep token arrays (recipe key `token_arrays: kept`, the default of the laptop recipes).

# %% tags=["parameters"]
runs_dir = "runs"  # a folder of runs, or one run
run = ""  # a run's id; empty: the newest training run that keeps entropies
limit = 200  # trajectories to sample at each end of the run
top = 0.2  # share of tokens that count as uncertain
words = []  # your own words; empty: the lists in rstar_lab.runs.words

# %%
import pandas as pd
from IPython.display import display

from rstar_lab.analysis import (
    count_words,
    excerpts,
    kinds,
    link,
    inspect,
    open_runs,
    plot_curves,
    plot_entropy,
    plot_kinds,
    plot_words,
    token_table,
    word_list,
    word_shift,
)
from rstar_lab.runs.words import FORKING_WORDS, REFLECTION_WORDS

pd.set_option("display.max_colwidth", 120)
if not run:
    run = open_runs(runs_dir).sql(
        "SELECT r.run_id FROM runs r JOIN rollup USING (run_id) WHERE entropy_n > 0 GROUP BY ALL ORDER BY max(r.created) DESC LIMIT 1"
    ).run_id[0]
runs = open_runs(runs_dir, run_ids=[run])
steps = runs.sql("SELECT min(step) AS first, max(step) AS last FROM rollup WHERE entropy_n > 0").iloc[0]
chosen = list(words) or [*FORKING_WORDS, *REFLECTION_WORDS]
runs.runs()[["run_id", "kind", "status", "steps", "trajectories"]]

# %% [markdown]
# ## Over the run
#
# Entropy a token, words of reflection a trajectory, and how far engine and trainer disagree about the tokens that were
# sampled. Click a point and the list below it shows the rollouts.

# %%
inspector = inspect(runs)
link(plot_curves(runs, ["entropy", "reflection_tokens", "log_prob_gap", "response_tokens"]), inspector)

# %%
inspector

# %% [markdown]
# ## How uncertain are tokens?
#
# A sample of the trajectories of the last steps. The line marks where the uncertain share begins.

# %%
third = max(1, int((steps["last"] - steps["first"]) / 3))
late = token_table(runs, f"step > {steps['last'] - third}", limit=limit, top=top, words=chosen)
plot_entropy(late)

# %% [markdown]
# ## Before and after the tool has answered

# %%
plot_kinds(late)

# %%
kinds(late)

# %% [markdown]
# In their context, the most uncertain tokens of each kind:

# %%
excerpts(late)

# %% [markdown]
# ## Which words?
#
# The list the data give: words by the entropy at which they begin. Those in the word list are hatched.

# %%
plot_words(late)

# %%
word_list(late).head(20)

# %% [markdown]
# ## What changed in training?
#
# Uses of a word per 1000 of the model's tokens, in the first and in the last third of the run.

# %%
early = token_table(runs, f"step < {steps['first'] + third}", limit=limit, top=top, words=chosen)
shift = word_shift(early, late)
display(shift.head(10), shift.tail(10))

# %% [markdown]
# ## Your own words
#
# Counted in the text of every kept transcript, not in a sample.

# %%
count_words(runs, chosen)

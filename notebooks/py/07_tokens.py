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
# # Tokens and tool use: entropy, forking, reflection, code
#
# **You learn** which tokens are uncertain, what the model writes after an error, and what its code does. **Time**: 10
# minutes to read; the cells run in seconds.
#
# Most tokens have low entropy. The paper analyses the 20% of tokens with the highest entropy and finds two kinds that
# matter: **forking tokens**, where the model explores or doubts, and **reflection tokens**, which follow a tool response:
# the model checks a result or diagnoses an error. This notebook separates them by position (before any tool response,
# after a successful one, after an error) and by words. Code inside a tool call is counted separately, because its entropy
# is usually low.
#
# It needs runs with token arrays (recipe key `rl.token_arrays: kept`, the default).

# %% tags=["parameters"]
runs_dir: str = ""  # folder of runs, or one run; empty: the nearest runs/ folder
run: str = ""  # run id; empty: the training run with the most steps that store entropies
limit: int = 200  # trajectories to sample from the end of the run
top: float = 0.2  # share of tokens that count as high-entropy
words: list[str] = []  # words to count; empty: the lists in rstar_lab.runs.reflection_words

# %%
import pandas as pd

from rstar_lab.analysis import (
    count_words,
    excerpts,
    format_numbers,
    token_kinds,
    link,
    inspect,
    open_runs,
    plot_curves,
    plot_entropy,
    plot_token_kinds,
    plot_tool_use,
    plot_high_entropy_words,
    token_table,
    word_list,
)
from rstar_lab.common.parameters import check_parameters
from rstar_lab.runs import RunStoreError, find_runs_dir
from rstar_lab.runs.reflection_words import FORKING_WORDS, REFLECTION_WORDS

check_parameters(globals())
runs_dir = find_runs_dir(runs_dir, required=True)

pd.set_option("display.max_colwidth", 120)
if not run:
    with_entropy = open_runs(runs_dir).sql(
        """SELECT r.run_id, count(*) AS steps FROM runs r JOIN rollup USING (run_id)
           WHERE entropy_n > 0 GROUP BY ALL ORDER BY steps DESC, max(r.created) DESC LIMIT 1"""
    )
    if with_entropy.empty:
        raise RunStoreError(f"{runs_dir} has no training run with token arrays: run `make demo`, or set runs_dir")
    run = with_entropy.run_id[0]
    print(f"run {run}: of all runs here it has the most steps with token arrays ({with_entropy.steps[0]}); set `run` for another")
runs = open_runs(runs_dir, run_ids=[run])
steps = runs.sql("SELECT min(step) AS first, max(step) AS last FROM rollup WHERE entropy_n > 0").iloc[0]
chosen = list(words) or [*FORKING_WORDS, *REFLECTION_WORDS]
runs.runs()[["run_id", "kind", "status", "steps", "trajectories"]]

# %% [markdown]
# ## Over the run
#
# Entropy per token, reflection words per trajectory, and the difference between the engine's and the trainer's
# log-probs of the sampled tokens. Click a point to list its rollouts below.

# %%
inspector = inspect(runs)
link(plot_curves(runs, ["entropy", "reflection_tokens", "log_prob_gap", "response_tokens"]), inspector)

# %%
inspector

# %% [markdown]
# ## Distribution of entropy
#
# A sample of trajectories from the last steps. The line marks the threshold of the high-entropy share.

# %%
third = max(1, int((steps["last"] - steps["first"]) / 3))
late = token_table(runs, f"step > {steps['last'] - third}", limit=limit, top=top, words=chosen)
plot_entropy(late)

# %% [markdown]
# ## Before and after a tool response

# %%
plot_token_kinds(late)

# %%
format_numbers(token_kinds(late))

# %% [markdown]
# The tokens with the highest entropy of each kind, in context:

# %%
excerpts(late)

# %% [markdown]
# ## Words
#
# Words ranked by the entropy of their first token. Words of the word list are hatched.

# %%
plot_high_entropy_words(late)

# %%
format_numbers(word_list(late).head(20))

# %% [markdown]
# ## Count words
#
# Counted in the text of every stored transcript, not in a sample.

# %%
count_words(runs, chosen)

# %% [markdown]
# ## Tool use
#
# What the model writes into its tool and what it does around it: length of the code, assertions, code that was run
# before, and calls made after the answer had already been printed. 95% intervals over problems.

# %%
plot_tool_use(runs)

# %% [markdown]
# ## Next steps
#
# - [05_inspect](05_inspect.ipynb) shows the tokens of a rollout in colour.
# - [14_counterfactual](14_counterfactual.ipynb) shows which of these rollouts another rule keeps.

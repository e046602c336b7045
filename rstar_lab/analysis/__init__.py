"""Data frames, metrics, figures and the inspector for the run store. Names are imported at first use."""

# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.analysis.alerts import find_alerts
    from rstar_lab.analysis.code_use import plot_tool_use, tool_calls, tool_use
    from rstar_lab.analysis.comparison import compare
    from rstar_lab.analysis.counterfactual_lab import counterfactual
    from rstar_lab.analysis.failures import failed_rollouts, failure_groups, plot_failures
    from rstar_lab.analysis.figures import plot_curves, plot_lengths, plot_outcomes, plot_pass_at_k
    from rstar_lab.analysis.inspector.inspector import Inspector, explore, inspect
    from rstar_lab.analysis.inspector.link import LinkedFigure, link
    from rstar_lab.analysis.inspector.overview import overview
    from rstar_lab.analysis.inspector.watch import watch
    from rstar_lab.analysis.metrics import METRICS, curves, measure, pass_at_k
    from rstar_lab.analysis.paper_figures import figures_of_the_paper, phase_table, results_table
    from rstar_lab.analysis.problem_heatmap import plot_heatmap, problem_table
    from rstar_lab.analysis.runs import Runs, open_runs
    from rstar_lab.analysis.tables import format_numbers
    from rstar_lab.analysis.timeline import plot_timeline
    from rstar_lab.analysis.tokens import (
        count_words,
        excerpts,
        plot_entropy,
        plot_high_entropy_words,
        plot_token_kinds,
        token_kinds,
        token_table,
        word_list,
    )
    from rstar_lab.exchange.importers import import_inspect, import_messages, import_trl, import_verl
    from rstar_lab.exchange.training_files import export_preferences, export_sft

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

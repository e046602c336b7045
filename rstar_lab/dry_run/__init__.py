"""One update of a recipe at full size on fake tensors, without a GPU: its memory, kernels, collectives and bounds of its time.

Nothing of the core imports this package: it runs the trainers' own code. Names are imported at first use.
"""

# ruff: noqa: F401  the names are the exports

from typing import TYPE_CHECKING

from rstar_lab.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from rstar_lab.dry_run.figures import plot_memory, plot_time
    from rstar_lab.dry_run.run import dry_run_rows

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)

"""rstar_lab: a notebook-first workbench for agentic reinforcement learning with a Python code tool."""

__version__ = "0.2.0"

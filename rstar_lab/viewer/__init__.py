"""The notebook's widgets in a browser without Jupyter: `rstar-lab view`. Nothing of the core imports this package."""

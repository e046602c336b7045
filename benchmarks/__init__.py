"""Measurements of this project against peers, with recorded results. Run them from a clone: `rstar-lab bench NAME`."""

"""Commands of `rstar-lab` that measure or simulate: one file each. They need the repository."""

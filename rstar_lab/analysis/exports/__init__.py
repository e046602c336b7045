"""Rollouts for other programs: ATIF documents, SFT and preference data."""

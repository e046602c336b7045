"""What every room of the package shares: errors, outcomes, estimates, progress, resources."""

"""Settings of all tests."""

import os

from hypothesis import settings

# `make test` says the same twice; `make test-all` looks for new examples.
settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

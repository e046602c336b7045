"""What must never be written down: values of secret environment variables, and passwords inside addresses."""

import os
import re
from collections.abc import Mapping

from rstar_lab.errors import UserError
from rstar_lab.runs import provenance

SECRET_NAME = re.compile(r"(^|[_.\-])(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
URL_PASSWORD = re.compile(
    r"(?P<before>[a-z][a-z0-9+.\-]*://[^\s:/@]*:)(?P<password>[^\s/@]+)(?P<after>@)", re.IGNORECASE
)
HIDDEN = "***"
# Shorter values occur in ordinary output by chance: replacing them would garble logs and hide nothing.
SHORTEST = 6


def secret_values(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Values to hide, longest first, so that one secret inside another leaves nothing behind."""
    named = {value for name, value in environ.items() if SECRET_NAME.search(name)}
    named |= {match["password"] for value in environ.values() for match in URL_PASSWORD.finditer(value)}
    return sorted((value for value in named if len(value) >= SHORTEST), key=len, reverse=True)


def redact(text: str, values: list[str]) -> str:
    """`text` with every secret value and every password of an address replaced by ***."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return URL_PASSWORD.sub(rf"\g<before>{HIDDEN}\g<after>", text)


def refuse_secrets(overrides: Mapping[str, object]) -> None:
    """Overrides are stored with the job and the run, so a secret has no place in them.

    Raises UserError naming the key.
    """
    for key, value in overrides.items():
        if provenance.redact(value, key) != value:
            raise UserError(
                f"{key}: a secret cannot be an override, since overrides are stored with the job; "
                "set it in an environment variable (for Redis: RSTAR_LAB_REDIS_URL) and leave the key out"
            )

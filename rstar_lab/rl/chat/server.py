"""An OpenAI-style server that writes texts, for `data add-tools`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from rstar_lab.common.errors import UserError
from rstar_lab.common.http_answers import MAX_S, limit_answers
from rstar_lab.common.service_tokens import find_token
from rstar_lab.rl.engines.server import API_KEY, error_text, read_model_card
from rstar_lab.untrusted.files import answer_json, reading


@dataclass(frozen=True, slots=True)
class ChatServer:
    """A server and its first model."""

    http: httpx.AsyncClient
    url: str
    model: str

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str) -> AsyncIterator["ChatServer"]:
        """Connect. Raises UserError if the server does not answer, rejects the token, or is not OpenAI-style."""
        url = url.rstrip("/").removesuffix("/v1")
        key = os.environ.get(API_KEY) or find_token(url) or _openai_key(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(10.0, read=MAX_S)
        client = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, trust_env=False)
        async with limit_answers(client) as http:
            yield cls(http, url, (await read_model_card(http, url))["id"])

    async def complete(self, text: str, *, temperature: float, max_tokens: int, seed: int) -> str:
        """Return the reply of the model to one user message, without its reasoning. Raises UserError if the server rejects it."""
        body = {
            "model": self.model, "messages": [{"role": "user", "content": text}], "temperature": temperature,
            "max_tokens": max_tokens, "seed": seed,
        }  # fmt: skip
        try:
            answer = await self.http.post("/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            raise UserError(f"{self.url}: connection lost: {error_text(error)}") from None
        if answer.status_code != 200:
            raise UserError(f"{self.url}: {answer.status_code} {answer.text[:500]}")
        with reading(f"{self.url}: not an answer of a chat model"):
            content: str = answer_json(answer, dict)["choices"][0]["message"]["content"] or ""
            return content.rpartition("</think>")[2].strip()


def _openai_key(url: str) -> str | None:
    """Return OPENAI_API_KEY for the server that OPENAI_BASE_URL names (default: that of OpenAI), None for any other server."""
    try:
        own, asked = urlsplit(os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com"), urlsplit(url)
    except ValueError:
        return None
    return os.environ.get("OPENAI_API_KEY") if (own.scheme, own.netloc) == (asked.scheme, asked.netloc) else None

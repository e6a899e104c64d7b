"""Helper behind any OpenAI-compatible endpoint (``POST {url}/chat/completions``)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from coterie.config import HelperConfig
from coterie.errors import UserError
from coterie.helpers.prompts import RolePrompt
from coterie.helpers.protocol import HelperError, HelperReply, HelperRequest
from coterie.helpers.sanitise import one_line

_RETRIED = frozenset({408, 409, 425, 429})  # and every 5xx


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    model: str = ""


@dataclass
class OpenAIHelper:
    """One role's endpoint. ``respond`` makes one try; time-outs, retries and limits are the pool's."""

    cfg: HelperConfig
    prompt: RolePrompt
    max_reply_bytes: int
    want_logprobs: bool = False
    _key: str = field(init=False, repr=False)
    _client: httpx.AsyncClient | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        role = self.prompt.tags.role
        if not _is_url(self.cfg.url):
            raise UserError(f"helpers.roles.{role}.url: give the endpoint's base URL, such as http://localhost:8000/v1")
        if not self.cfg.model:
            raise UserError(f"helpers.roles.{role}.model: name the model that the endpoint serves")
        self._key = os.environ.get(self.cfg.key_env, "").strip() if self.cfg.key_env else ""
        if self.cfg.key_env and not (self._key and self._key.isascii() and self._key.isprintable()):
            raise UserError(
                f"helpers.roles.{role}.key_env: the environment variable {self.cfg.key_env} holds no usable key"
            )
        try:
            json.dumps(self.cfg.extra_body)
        except TypeError as e:
            raise UserError(f"helpers.roles.{role}.extra_body: cannot be sent as JSON: {e}") from e

    @property
    def name(self) -> str:
        return self.cfg.model

    @property
    def where(self) -> str:
        """The address asked, for people: without what may be secret in it."""
        return str(httpx.URL(self._url).copy_with(userinfo=b"", query=None))

    @property
    def _url(self) -> str:
        return self.cfg.url.rstrip("/") + "/chat/completions"

    async def respond(self, request: HelperRequest) -> HelperReply:
        """One try.

        Raises:
            HelperError: connection, http, too_large, malformed or empty (see the kinds of HelperFailure).
        """
        body = await self._post(self._payload(request))
        try:
            completion = msgspec.json.decode(body, type=_Completion)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as e:
            raise HelperError("malformed", self._shown(f"not a chat completion: {e}"), retry=True) from e
        if not completion.choices or completion.choices[0].message.role != "assistant":
            raise HelperError("malformed", "no message with role assistant in the reply", retry=True)
        choice = completion.choices[0]
        if not (choice.message.content or "").strip():
            raise HelperError("empty", f"empty reply (finish_reason {choice.finish_reason})")
        return self._reply(choice)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _payload(self, request: HelperRequest) -> dict[str, Any]:
        system, user = self.prompt.messages(request)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": user})
        payload: dict[str, Any] = {
            "model": self.cfg.model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "temperature": self.cfg.temperature,
        }
        if self.want_logprobs or self.cfg.same_tokenizer:
            payload["logprobs"] = True
        if self.cfg.same_tokenizer:
            payload["return_token_ids"] = True
        payload |= self.cfg.extra_body
        return payload

    async def _post(self, payload: dict[str, Any]) -> bytes:
        if self._client is None:  # made on the loop that uses it
            headers = {"Accept-Encoding": "identity"}  # a small compressed body could grow beyond any limit
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._client = httpx.AsyncClient(headers=headers, timeout=None)  # the pool bounds the whole try
        body = bytearray()
        try:
            async with self._client.stream("POST", self._url, json=payload) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > self.max_reply_bytes:
                        raise HelperError("too_large", f"reply longer than {self.max_reply_bytes} bytes")
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise HelperError("connection", self._shown(f"{type(e).__name__}: {e}"), retry=True) from e
        if response.status_code != 200:
            detail = self._shown(f"HTTP {response.status_code}: {body[:200].decode(errors='replace')}")
            retry = response.status_code in _RETRIED or response.status_code >= 500
            raise HelperError("http", detail, retry=retry, retry_after_s=_seconds(response.headers.get("retry-after")))
        return bytes(body)

    def _reply(self, choice: _Choice) -> HelperReply:
        content = (choice.logprobs.content if choice.logprobs else None) or []
        logprobs = tuple(p.logprob for p in content)
        ids = tuple(choice.token_ids) if self.cfg.same_tokenizer and choice.token_ids is not None else None
        # A server's log-probs are those of the model at temperature 1, whatever temperature it sampled at.
        known = ids is not None and len(logprobs) == len(ids) and self.cfg.temperature == 1.0
        valid = all(math.isfinite(p) and p <= 1e-6 for p in logprobs)
        return HelperReply(
            text=choice.message.content or "",
            helper=self.name,
            token_ids=ids,
            logprobs=logprobs if known and valid else None,
            span_logprob=math.fsum(logprobs) if logprobs and valid and self.cfg.temperature == 1.0 else None,
            cut=choice.finish_reason == "length",
            offered_logprobs=bool(logprobs) and valid,
        )

    def _shown(self, detail: str) -> str:
        """Error text for people: one line, and never with the key in it (some servers echo it)."""
        clean = one_line(detail)
        return clean.replace(self._key, "***") if self._key else clean


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # a date: rare, and the normal back-off does
        return 0.0

"""Two real HTTP servers on loopback: one serves a small model through the OpenAI protocol, one misbehaves on purpose."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
        self.server.reply(self, body)

    def send_json(self, status: int, data: Any, headers: dict[str, str] | None = None) -> None:
        self.send_bytes(status, json.dumps(data).encode(), headers)

    def send_bytes(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that give up in the middle are part of the tests

    def __init__(self, reply: Callable[[_Handler, dict[str, Any]], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.requests: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def serving(reply: Callable[[_Handler, dict[str, Any]], None]) -> Iterator[_Server]:
    server = _Server(reply)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def completion(text: str | None, **choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **choice.pop("message", {})}
    return {"object": "chat.completion", "model": "m", "choices": [{"index": 0, "message": message, **choice}]}


class ModelReply:
    """Answers with a Hugging Face model: samples at temperature 1, returns log-probs and (if asked) token ids."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.generator = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()

    def __call__(self, handler: _Handler, body: dict[str, Any]) -> None:
        if handler.path != "/v1/chat/completions":
            handler.send_json(404, {"error": {"message": "no such route"}})
            return
        with self.lock:
            handler.send_json(200, self._complete(body))

    @torch.inference_mode()
    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids: list[int] = []
        logprobs: list[float] = []
        end = self.tokenizer.eos_token_id
        while len(ids) < body["max_tokens"] and end not in ids:
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]  # [V]
            p = torch.log_softmax(logits, -1)
            token = int(torch.multinomial(p.exp(), 1, generator=self.generator))
            ids.append(token)
            logprobs.append(float(p[token]))
        choice: dict[str, Any] = {"finish_reason": "stop" if end in ids else "length"}
        if body.get("logprobs"):
            content = [{"token": self.tokenizer.decode([i]), "logprob": p} for i, p in zip(ids, logprobs, strict=True)]
            choice["logprobs"] = {"content": content}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        return completion(self.tokenizer.decode(ids, skip_special_tokens=True), **choice)


# What a faulty endpoint may do; the name is the model asked for.
def _slow(h: _Handler, body: dict[str, Any]) -> None:
    time.sleep(0.6)
    h.send_json(200, completion("late"))


def _drip(h: _Handler, body: dict[str, Any]) -> None:
    """Never silent for long, never done."""
    h.send_response(200)
    h.end_headers()
    for _ in range(100):
        h.wfile.write(b" ")
        h.wfile.flush()
        time.sleep(0.02)


def _disconnect(h: _Handler, body: dict[str, Any]) -> None:
    h.close_connection = True
    h.connection.close()


def _half(h: _Handler, body: dict[str, Any]) -> None:
    """Breaks off in the middle of a body it announced."""
    h.send_response(200)
    h.send_header("Content-Length", "500")
    h.end_headers()
    h.wfile.write(b'{"choices": [')
    h.close_connection = True


def _gzip_bomb(h: _Handler, body: dict[str, Any]) -> None:
    import gzip

    h.send_bytes(200, gzip.compress(b" " * 5_000_000), {"Content-Encoding": "gzip"})


FAULTS: dict[str, Callable[[_Handler, dict[str, Any]], None]] = {
    "slow": _slow,
    "drip": _drip,
    "disconnect": _disconnect,
    "half": _half,
    "gzip": _gzip_bomb,
    "500": lambda h, b: h.send_json(500, {"error": {"message": "boom\x1b[31m"}}),
    "404": lambda h, b: h.send_json(404, {"error": {"message": "no such model"}}),
    "401": lambda h, b: h.send_json(401, {"error": {"message": f"bad key {h.headers.get('Authorization')}"}}),
    "redirect": lambda h, b: h.send_json(302, {}, {"Location": "http://127.0.0.1:9/"}),
    "not_json": lambda h, b: h.send_bytes(200, b'{"choices": [{"mess'),
    "not_utf8": lambda h, b: h.send_bytes(200, b'{"choices": [{"message": {"content": "\xff\xfe"}}]}'),
    "deep": lambda h, b: h.send_bytes(200, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "choices": []}'),
    "no_choices": lambda h, b: h.send_json(200, {"choices": []}),
    "wrong_types": lambda h, b: h.send_json(200, {"choices": {"message": 3}}),
    "wrong_role": lambda h, b: h.send_json(200, completion("sound", message={"role": "user"})),
    "null": lambda h, b: h.send_json(200, completion(None)),
    "all_think": lambda h, b: h.send_json(200, completion("<think>never done")),
    "huge": lambda h, b: h.send_json(200, completion("x" * 3_000_000)),
    "giant": lambda h, b: h.send_json(200, completion("word " * 5000)),
    "tags": lambda h, b: h.send_json(200, completion("</feedback><verify>a</verify><|end|>ok")),
    "answer": lambda h, b: h.send_json(200, completion(r"it is \boxed{42}, <answer>42</answer>")),
    "bad_ids": lambda h, b: h.send_json(
        200, completion("ok", token_ids=[10**6, -1], logprobs={"content": [{"logprob": -1.0}] * 2})
    ),
    "bad_logprobs": lambda h, b: h.send_json(
        200, completion("ok", token_ids=[ord("o")], logprobs={"content": [{"logprob": 3.0}]})
    ),
}


def faulty(h: _Handler, body: dict[str, Any]) -> None:
    FAULTS[body["model"]](h, body)

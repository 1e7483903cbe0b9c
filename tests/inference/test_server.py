"""A real server on a free port of loopback: many clients at once, limits, what is wrong, and how it ends."""

from __future__ import annotations

import asyncio
import codecs
import gc
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn")

import overnight
from overnight.config import BertRun
from overnight.errors import UserError
from overnight.inference import server
from overnight.inference.server import Limits, application
from overnight.inference.worker import Worker
from tests.conftest import ROOT
from tests.inference.serving import ask, sent, start

Captured = pytest.CaptureFixture[str]


def test_unknown_paths_and_methods_are_answered_in_json(port: int) -> None:
    for path in ("/nothing", "/predict/"):  # a redirection would be an empty answer to `curl`
        assert ask(port, path, {"texts": ["a"]}) == (
            404,
            {"error": f"there is no {path}; there are /, /health, /predict, /fill and /embed"},
        )
    assert ask(port, "/predict") == (405, {"error": "/predict takes POST, not GET"})
    status, answer = ask(port, "/health", {}, "DELETE")
    assert status == 405 and answer["error"].endswith("not DELETE") and "GET" in answer["error"]


def test_fifty_clients_at_once_have_each_their_own_answers(port: int, trained_run: BertRun) -> None:
    task = overnight.load(trained_run.run_dir, task="classes")
    texts = [[f"integer {n} " * (n % 7 + 1), f"string {n}"] for n in range(50)]

    def client(number: int) -> tuple[tuple[int, Any], tuple[int, Any]]:
        asked = {"texts": texts[number]}
        return ask(port, "/predict", asked), ask(port, "/embed", {**asked, "pooling": ("mean", "first")[number % 2]})

    with ThreadPoolExecutor(50) as clients:
        found = list(clients.map(client, range(50)))
    for number, ((status, answers), (embedded, vectors)) in enumerate(found):
        assert (status, embedded) == (200, 200)
        for mine, expected in zip(answers["answers"], task.predict(texts[number]), strict=True):
            assert mine["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-4)
        expected_vectors = task.embed(texts[number], ("mean", "first")[number % 2])
        np.testing.assert_allclose(vectors["embeddings"], expected_vectors, atol=1e-5)


def test_it_says_what_it_serves_and_has_a_page(port: int) -> None:
    status, health = ask(port, "/health")
    assert status == 200 and health["status"] == "ok" and health["task"] == "classes" and health["width"] == 32
    assert (health["pairs"], health["fills"]) == (False, False)
    status, page = ask(port, "/")
    assert status == 200 and "<textarea" in page and "http" not in page.replace("http-equiv", "")


def test_a_pretrained_model_fills_in_masks(trained_run: BertRun) -> None:
    texts = ["an [MASK] division", "a [MASK] of a [MASK]"]
    process, number = start(trained_run)
    with process:
        assert {key: ask(number, "/health")[1][key] for key in ("kind", "fills", "pairs")} == {"kind": "mask", "fills": True, "pairs": None}
        model = overnight.load(trained_run.run_dir)
        answer = ask(number, "/fill", {"texts": texts})
        assert answer == (200, {"answers": [model.fill(text) for text in texts]})
        assert [len(masks) for masks in answer[1]["answers"]] == [1, 2]
        status, refused = ask(number, "/fill", {"texts": [texts[0], "none"]})
        assert status == 400 and "line 2: no [MASK]" in refused["error"]
        for odd in (["one", "other"], {"words": "[MASK]"}, 3):
            assert ask(number, "/fill", {"texts": [odd]})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/fill", {"texts": ["an [MASK]"]}, 400, "is of the task 'classes', so it cannot fill in [MASK]"),
        ("/predict", b'{"texts": ["' + b"a" * 3000 + b'"]}', 413, "more than 2,000 bytes"),
        ("/predict", {"texts": ["a"] * 5}, 413, "5 texts; at most 4"),
        ("/predict", b'{"texts": ["\xff"]}', 400, "not UTF-8 (byte 12)"),
        ("/predict", b'{"texts": [', 400, "not JSON"),
        ("/predict", b"[" * 1500, 400, "not JSON"),
        ("/predict", b'{"texts": [{"text": "a", "id": NaN}]}', 400, "not JSON (NaN is no number"),
        ("/predict", b'{"texts": ["\\ud800"]}', 400, "surrogate"),
        ("/predict", b'{"texts": ["a"], "\\udc00": 1}', 400, "surrogate"),
        ("/embed", b'{"texts": ["a"], "pooling": "\\ud800"}', 400, "surrogate"),
        ("/predict", b'["\\uDFFF"]', 400, "surrogate"),
        ("/predict", [], 400, "must be an object with a list of texts"),
        ("/predict", {"texts": []}, 400, "must be an object with a list of texts"),
        ("/predict", {"texts": ["a"], "layer": 1}, 400, "layer: is not known here"),
        ("/predict", {"texts": [{"words": "a"}]}, 400, "line 1: has the keys words"),
        ("/embed", {"texts": [3]}, 400, "each must be a string"),
        ("/embed", {"texts": ["a"], "pooling": "max"}, 400, "pooling = 'max'"),
        ("/embed", {"texts": ["a"], "layer": 9}, 400, "layer = 9"),
        ("/embed", {"texts": ["a"], "layer": True}, 400, "layer a whole number"),
    ],
)
def test_a_request_that_is_wrong_is_told_why(path: str, body: Any, status: int, message: str, port: int) -> None:
    found, answer = ask(port, path, body)
    assert found == status and message in answer["error"]


def test_other_ways_to_ask_are_refused(port: int) -> None:
    assert ask(port, "/predict")[0] == 405
    assert ask(port, "/etc/passwd")[0] == 404
    status, answer = ask(port, "/health", Host="elsewhere.example")
    assert status == 400 and answer["error"].startswith("elsewhere.example is not a local name of this machine; use 127.0.0.1 or ")
    assert sent(port, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 "), "no browser leaves the name out"
    head, _, body = sent(port, b"no request\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and json.loads(body) == {"error": "is no request of HTTP/1.1 or 1.0"}


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "localhost", 200),
        ("HTTP://127.0.0.1:8000/health?a", "elsewhere.example", 200),  # the header is not asked
        ("http://[::1]", "localhost", 200),
        ("http://localhost/%68ealth", "localhost", 200),
        ("http://localhost/nothing", "localhost", 404),
        ("http://elsewhere.example/health", "localhost", 400),
        ("http://user@elsewhere.example/health", "localhost", 400),
        ("http:///health", "localhost", 404),
        ("http%3A//localhost/health", "localhost", 404),
    ],
)
def test_a_whole_address_is_asked_as_its_path_under_its_name(target: str, host: str, status: int, port: int) -> None:
    found = sent(port, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert found.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("bound", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False)],
)
def test_on_every_address_of_loopback_only_local_names_are_answered(bound: str, local: bool, trained_run: BertRun) -> None:
    app = application(overnight.load(trained_run.run_dir), bound, Limits())

    async def status(name: str) -> int:
        answers: list[Any] = []

        async def send(message: Any) -> None:
            answers.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {"type": "http", "method": "GET", "path": "/health", "query_string": b"", "headers": [(b"host", name.encode())]}
        await app(scope, receive, send)
        return int(answers[0]["status"])

    assert asyncio.run(status("evil.example")) == asyncio.run(status("evil.example:8000")) == (400 if local else 200)
    own = f"[{bound}]:8000" if ":" in bound else f"{bound}:8000"
    assert [asyncio.run(status(name)) for name in (own, "localhost:8000", "127.0.0.1", "[::1]:8000")] == [200] * 4


def test_a_body_may_begin_with_a_byte_order_mark(port: int) -> None:
    body = b'{"texts": ["an integer"]}'
    assert ask(port, "/predict", codecs.BOM_UTF8 + body) == ask(port, "/predict", body)
    assert ask(port, "/predict", codecs.BOM_UTF8 + body)[0] == 200
    assert ask(port, "/predict", codecs.BOM_UTF8 + b"\xff") == (400, {"error": "the body is not UTF-8 (byte 3)"})


def test_the_requests_of_the_documentation_are_answered(port: int) -> None:
    page = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    shown = re.findall(r"^curl http://127\.0\.0\.1:8000(/\w+)(?: -d '(.*)')?$", page, re.MULTILINE)
    assert {path for path, _ in shown} == {"/predict", "/embed", "/health"}
    for path, body in shown:
        assert ask(port, path, body.encode() or None)[0] == 200


def test_a_request_whose_client_leaves_while_it_is_computed_ends_without_a_word(
    trained_run: BertRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, said = threading.Event(), list[Any]()

    def answers(model: Any, kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        while texts == ["endless"]:
            model.trained.between()
            time.sleep(0.001)
        return [np.zeros(1) for _ in texts]

    monkeypatch.setattr(server, "_answers", answers)
    app = application(overnight.load(trained_run.run_dir), "127.0.0.1", Limits())
    scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": [(b"host", b"localhost")]}

    async def embed(text: str) -> list[Any]:
        body, sent = [{"type": "http.request", "body": json.dumps({"texts": [text]}).encode()}], list[Any]()

        async def receive() -> Any:
            if body:
                return body.pop()
            await (asyncio.to_thread(begun.wait) if text == "endless" else asyncio.Event().wait())
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent

    async def go() -> list[list[Any]]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        found = [await embed(text) for text in ("endless", "b")]
        gc.collect()  # an error that nobody asked for is told then
        return found

    assert [sent[0]["status"] for sent in asyncio.run(go())] == [400, 200]
    assert not said


def test_between_the_batches_of_the_model_others_may_be_answered(trained_run: BertRun, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(Worker, "between", lambda worker: threads.append(threading.current_thread().name))
    app = application(overnight.load(trained_run.run_dir), "127.0.0.1", Limits())
    scope = {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": [(b"host", b"localhost")]}
    body = [{"type": "http.request", "body": json.dumps({"texts": ["a word " * 100] * 256}).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        return body.pop() if body else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200
    assert len(threads) > 1 and set(threads) == {"model"}


def test_a_client_that_leaves_takes_its_request_out_of_the_queue(trained_run: BertRun, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, answered = threading.Event(), threading.Event(), list[Any]()

    def answers(model: Any, kind: Any, texts: list[Any]) -> list[Any]:
        begun.set()
        go_on.wait()
        answered.extend(texts)
        return [np.zeros(1) for _ in texts]

    monkeypatch.setattr(server, "_answers", answers)
    app = application(overnight.load(trained_run.run_dir), "127.0.0.1", Limits())

    async def embed(text: str, leaves: bool) -> list[Any]:
        body = {"type": "http.request", "body": json.dumps({"texts": [text]}).encode()}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            if body:
                return {"type": body.pop("type"), "body": body.pop("body")}
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        await app(
            {"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": [(b"host", b"localhost")]}, receive, send
        )
        return sent

    async def go() -> list[Any]:
        first = asyncio.create_task(embed("a", leaves=False))
        await asyncio.to_thread(begun.wait)
        await asyncio.wait_for(embed("gone", leaves=True), 20)
        second = asyncio.create_task(embed("b", leaves=False))
        go_on.set()
        return await asyncio.gather(first, second)

    assert [sent[0]["status"] for sent in asyncio.run(go())] == [200, 200]
    assert answered == ["a", "b"]


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_model_that_computes_no_finite_number_answers_nothing(number: float, trained_run: BertRun) -> None:
    models = [overnight.load(trained_run.run_dir), overnight.load(trained_run.run_dir, "classes")]
    for model in models:
        with torch.no_grad():
            model.trained.network.encoder.layers[-1].norm2.bias.fill_(number)
    for answer in (models[0].fill_all, models[0].embed, models[1].predict, models[1].embed):
        with pytest.raises(UserError, match="the model computes numbers that are not finite"):
            answer(["a [MASK] b"])
    app, sent = application(models[0], "127.0.0.1", Limits()), list[Any]()

    async def embed() -> None:
        body = {"type": "http.request", "body": b'{"texts": ["a"]}'}

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            if not body:
                await asyncio.Event().wait()
            return {"type": body.pop("type"), "body": body.pop("body")}

        headers = [(b"host", b"localhost")]
        await app({"type": "http", "method": "POST", "path": "/embed", "query_string": b"", "headers": headers}, receive, send)

    asyncio.run(embed())
    assert sent[0]["status"] == 500 and "numbers that are not finite" in json.loads(sent[1]["body"])["error"]

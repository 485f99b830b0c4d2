"""Tests of the other ways in: a relay on the websockets package, TLS, a Unix socket, WSGI. All on loopback.

Each has a real server of another package before it or around it, as in test_interop.py. They are a file of
their own because files run beside each other, which keeps the suite under ten minutes on two cores.

Relay            the codec by itself, then a worker before relays
Listening        each of the others, on a real worker
"""

import base64
import contextlib
import hashlib
import http.client
import http.server
import io
import json
import os
import queue
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tarfile
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest
import trustme
from hypothesis import given, settings, strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, SERVER
from websockets.sync.server import serve

import strata_worker
from strata_worker import (
    BINARY,
    CLOSE,
    Disconnected,
    FileSlice,
    FrameError,
    FrameReader,
    Handshake,
    PING,
    PONG,
    Relay,
    RelayRefused,
    Response,
    TEXT,
    WorkerError,
    error_response,
    frame,
    json_response,
    masked,
)
# ---------------------------------------------------------------------------------------
# Relay: the codec by itself, then a worker before relays on the websockets package
# ---------------------------------------------------------------------------------------

MIB = 2**20
SUBPROTOCOL = "strata-worker-connect.v1"


# --- The codec --------------------------------------------------------------------------


def from_server(opcode, payload=b"", fin=True, head=None):
    """A frame as a server sends it: not masked."""
    return Frame(Opcode(opcode), payload, fin).serialize(mask=False)


def messages_of(data, step=None):
    reader, found = FrameReader(), []
    for start in range(0, len(data), step or max(1, len(data))):
        reader.feed(data[start : start + (step or len(data))])
        while (message := reader.next()) is not None:
            found.append(message)
    return found


@pytest.mark.parametrize("step", [1, 2, 7, None])
def test_messages_are_read_whatever_the_pieces_they_come_in(step):
    data = (
        from_server(TEXT, "grüße".encode())
        + from_server(PING, b"now")
        + from_server(BINARY, b"x" * 200)
        + from_server(BINARY, b"y" * 70_000)
        + from_server(TEXT, b"")
        + from_server(CLOSE, b"\x03\xe8bye")
    )
    assert messages_of(data, step) == [
        (TEXT, "grüße"),
        (PING, b"now"),
        (BINARY, b"x" * 200),
        (BINARY, b"y" * 70_000),
        (TEXT, ""),
        (CLOSE, b"\x03\xe8bye"),
    ]


@pytest.mark.parametrize("step", [1, 3, None])
def test_a_ping_in_between_two_fragments_is_seen_before_the_message(step):
    data = (
        from_server(TEXT, b"gr\xc3", fin=False)
        + from_server(PING, b"p")
        + from_server(0, b"\xbc", fin=False)
        + from_server(0, b"n")
    )
    assert messages_of(data, step) == [(PING, b"p"), (TEXT, "grün")]


BROKEN = {
    "a reserved bit": (b"\xc1\x00", 1002),
    "a reserved opcode": (b"\x83\x00", 1002),
    "a reserved control opcode": (b"\x8b\x00", 1002),
    "a masked frame": (b"\x81\x81abcdx", 1002),
    "a long ping": (b"\x89\x7e\x00\x7e" + b"x" * 126, 1002),
    "a fragmented ping": (b"\x09\x01x", 1002),
    "a continuation of nothing": (b"\x80\x01x", 1002),
    "a message within a message": (b"\x01\x01x\x81\x01y", 1002),
    "a 16-bit length below 126": (b"\x82\x7e\x00\x05hello", 1002),
    "a 64-bit length below 65536": (b"\x82\x7f" + (5).to_bytes(8, "big") + b"hello", 1002),
    "a length with its highest bit set": (b"\x82\x7f" + (2**63).to_bytes(8, "big"), 1009),
    "a chunk of 1 MiB and a byte": (b"\x82\x7f" + (MIB + 5).to_bytes(8, "big"), 1009),
    "text that is not UTF-8": (b"\x81\x02\xc3\x28", 1007),
    "text that ends within a character": (b"\x81\x01\xc3", 1007),
    "text with a surrogate": (b"\x81\x03\xed\xa0\x80", 1007),
    "a Close of one byte": (b"\x88\x01\x03", 1002),
    "a Close of a reserved code": (b"\x88\x02\x03\xed", 1002),
    "a Close whose reason is not UTF-8": (b"\x88\x03\x03\xe8\xff", 1007),
}


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize("name", BROKEN)
def test_what_rfc_6455_forbids_is_refused_with_its_code(name, step):
    data, code = BROKEN[name]
    with pytest.raises(FrameError) as caught:
        messages_of(data, step)
    assert caught.value.code == code


def test_fragments_are_counted_together_against_the_bound():
    piece = from_server(BINARY, b"x" * 600_000, fin=False)
    with pytest.raises(FrameError) as caught:
        messages_of(piece + from_server(0, b"x" * 600_000))
    assert caught.value.code == 1009


def test_a_chunk_of_1_mib_and_its_stream_id_are_within_the_bound():
    assert messages_of(from_server(BINARY, bytes(MIB + 4))) == [(BINARY, bytes(MIB + 4))]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=70_000), st.binary(min_size=4, max_size=4), st.sampled_from([4, 8, 64, 16384]))
def test_masking_is_an_xor_with_the_repeated_key(data, key, block):
    assert b"".join(masked(data, key, block)) == bytes(byte ^ key[i % 4] for i, byte in enumerate(data))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just(TEXT), st.text(max_size=300)),
            st.tuples(st.just(BINARY), st.binary(max_size=300)),
            st.tuples(st.sampled_from([PING, PONG]), st.binary(max_size=125)),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_any_messages_come_through_any_fragmentation(messages, random):
    data = b""
    for opcode, content in messages:
        payload = content.encode() if opcode == TEXT else content
        cuts = sorted(random.randrange(len(payload) + 1) for _ in range(random.randrange(3))) if opcode < CLOSE else []
        ends = [*cuts, len(payload)]
        for index, (start, end) in enumerate(zip([0, *cuts], ends)):
            data += from_server(0 if index else opcode, payload[start:end], fin=index == len(cuts))
    assert messages_of(data, random.randrange(1, 100)) == messages


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_junk_is_read_or_refused_but_never_crashes(data, step):
    with contextlib.suppress(FrameError):
        messages_of(data, step)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65535, 65536, MIB + 4])
def test_our_frames_are_what_websockets_reads(size):
    peer, payload = Protocol(SERVER, max_size=None), os.urandom(size)
    peer.receive_data(frame(BINARY, payload))
    (event,) = peer.events_received()
    assert bytes(event.data) == payload and event.opcode == BINARY and event.fin


def test_each_frame_has_a_key_of_its_own():
    assert len({frame(BINARY, b"")[2:6] for _ in range(50)}) == 50


# --- The handshake ----------------------------------------------------------------------


def handshake(answer, url="ws://relay/"):
    shake = Handshake(url, None)
    key = dict(line.split(b": ", 1) for line in shake.request().split(b"\r\n")[1:-2])[b"Sec-WebSocket-Key"]
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return shake, answer.replace(b"ACCEPT", accept)


GOOD = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Accept: ACCEPT\r\nSec-WebSocket-Protocol: strata-worker-connect.v1\r\n\r\n"
)


def test_a_handshake_may_come_one_byte_at_a_time_with_frames_behind_it():
    shake, answer = handshake(GOOD)
    for byte in answer[:-1]:
        assert shake.feed(bytes([byte])) is None
    assert shake.feed(answer[-1:] + b"\x81\x00") == b"\x81\x00"


@pytest.mark.parametrize(
    "old, new, final",
    [
        (b"ACCEPT", b"ACCEPU", False),
        (b"Upgrade: WebSocket", b"Upgrade: h2c", False),
        (b"keep-alive, Upgrade", b"keep-alive", False),
        (b"\r\n\r\n", b"\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n", False),
        (b"strata-worker-connect.v1", b"strata-worker-connect.v2", True),
        (b"Sec-WebSocket-Protocol: strata-worker-connect.v1\r\n", b"", True),
        (GOOD, b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", True),
        (GOOD, b"HTTP/1.1 408 Slow\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 429 Many\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", False),
        (GOOD, b"SSH-2.0-OpenSSH\r\n\r\n", False),
    ],
)
def test_any_other_answer_to_the_handshake_is_final_or_not(old, new, final):
    shake, answer = handshake(GOOD.replace(old, new))
    with pytest.raises(RelayRefused if final else Disconnected):
        shake.feed(answer)


def test_a_relay_that_hangs_up_in_its_refusal_is_still_believed():
    shake, answer = handshake(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 50\r\n\r\nno")
    with pytest.raises(RelayRefused, match="401 Unauthorized"):
        shake.feed(answer)
        shake.feed(b"")


def test_a_relay_that_hangs_up_unasked_is_dialled_again():
    shake, _ = handshake(b"")
    with pytest.raises(Disconnected):
        shake.feed(b"")


def test_a_refusal_says_what_the_relay_said():
    shake, answer = handshake(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 13\r\n\r\ntoken expired")
    with pytest.raises(RelayRefused, match="401 Unauthorized: 'token expired'"):
        shake.feed(answer)


def test_waits_double_from_1_to_60_seconds_and_their_second_half_is_random():
    for expected, wait in zip([1, 2, 4, 8, 16, 32, 60, 60], strata_worker.dial_waits()):
        assert expected / 2 <= wait <= expected


# --- A relay and its worker -------------------------------------------------------------


class RelayPeer:
    """A relay on `websockets`, whose requests the test makes."""

    __test__ = False

    def __init__(self, port=0, **options):
        self.sockets = queue.Queue()
        self.streams, self.numbers = {}, iter(range(1, 1000))
        self.server = serve(
            self.handle,
            "127.0.0.1",
            port,
            **{"subprotocols": [SUBPROTOCOL], "compression": "deflate", "max_size": MIB + 4, **options},
        )
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def handle(self, ws):
        self.ws = ws
        self.sockets.put(ws)
        for message in ws:
            if isinstance(message, bytes):
                assert 4 < len(message) <= MIB + 4
                self.streams[int.from_bytes(message[:4], "big")].put(message[4:])
            else:
                self.streams[json.loads(message)["id"]].put(json.loads(message))

    def send(self, **fields):
        self.ws.send(json.dumps(fields))

    def begin(self, method, path, headers=(), number=None, query=""):
        number = number or next(self.numbers)
        self.streams[number] = queue.Queue(8)
        self.send(
            type="request", id=number, method=method, path=path, query=query, headers=[list(pair) for pair in headers]
        )
        return Exchange(self, number)

    def ask(self, method, path, body=(), headers=()):
        exchange = self.begin(method, path, headers)
        for chunk in body:
            exchange.chunk(chunk)
        exchange.end()
        return exchange

    def close(self):
        self.server.shutdown()


class Exchange:
    def __init__(self, relay, number):
        self.relay, self.number, self.frames = relay, number, relay.streams[number]

    def chunk(self, data):
        self.relay.ws.send(self.number.to_bytes(4, "big") + data)

    def end(self):
        self.relay.send(type="end", id=self.number)

    def abort(self):
        self.relay.send(type="abort", id=self.number)

    def start(self):
        frame = self.frames.get(timeout=20)
        assert frame["type"] == "response", frame
        return frame["status"], dict(frame["headers"])

    def pieces(self):
        """The body's chunks; "end" or "abort" comes last, as ``self.ending``."""
        while True:
            frame = self.frames.get(timeout=20)
            if isinstance(frame, dict):
                self.ending = frame["type"]
                return
            yield frame

    def answer(self):
        status, headers = self.start()
        return status, headers, b"".join(self.pieces())


@pytest.fixture
def tell(monkeypatch):
    """The queue of what a relay's worker was refused with; dialling is fast."""
    monkeypatch.setattr(strata_worker, "dial_waits", lambda: iter(lambda: 0.05, None))
    return queue.Queue()


@pytest.fixture
def relay_serving(tell):
    """Starts relays and workers for an answer function, and stops them."""
    with contextlib.ExitStack() as stack:

        def start(answer, token=None, stall=20, **options):
            relay = RelayPeer(**options)
            stack.callback(relay.close)
            worker = Relay(answer, "ws://127.0.0.1:%d/worker?secret=1" % relay.port, token, stall, tell.put)
            stack.callback(worker.stop)
            worker.start()
            relay.worker = worker
            relay.sockets.get(timeout=10)
            return relay

        yield start


class Closing:
    """Counts the answers that were closed."""

    def __init__(self):
        self.count = threading.Semaphore(0)

    def __call__(self):
        self.count.release()

    def wait(self):
        assert self.count.acquire(timeout=10)


def echo(request):
    return Response(200, list(iter(request.body.read, b"")), [("X-Path", request.path), ("X-Method", request.method)])


def echo_or_tell(lost):
    """echo, which also tells the queue ``lost`` when the body is."""

    def answer(request):
        try:
            return echo(request)
        except Disconnected:
            lost.put("disconnected")
            raise

    return answer


def test_a_forwarded_request_is_the_request_and_its_answer_the_answer(relay_serving):
    def answer(request):
        told = [
            request.method,
            request.path,
            request.query,
            request.headers.get("x-a"),
            b"".join(iter(request.body.read, b"")).decode(),
        ]
        return json_response(418, told, [("X-B", "2")])

    relay = relay_serving(answer)
    relay.streams[9] = queue.Queue()
    relay.send(type="request", id=9, method="PUT", path="/a%20b", query="c=d", headers=[["X-A", "1"]])
    exchange = Exchange(relay, 9)
    exchange.chunk(b"he")
    exchange.chunk(b"llo")
    exchange.end()
    status, headers, body = exchange.answer()
    assert (status, headers["X-B"], headers["Content-Length"]) == (418, "2", str(len(body)))
    assert json.loads(body) == ["PUT", "/a%20b", "c=d", "1", "hello"]
    assert exchange.ending == "end"


def test_the_handshake_carries_the_token_and_offers_the_subprotocol_and_no_extension(relay_serving):
    relay = relay_serving(echo, token="s3cret")
    headers = relay.ws.request.headers
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Sec-WebSocket-Protocol"] == SUBPROTOCOL
    assert "Sec-WebSocket-Extensions" not in headers
    assert relay.ws.request.path == "/worker?secret=1"


def test_without_a_token_there_is_no_authorization(relay_serving):
    assert "Authorization" not in relay_serving(echo).ws.request.headers


def test_a_head_request_gets_the_headers_alone(relay_serving):
    status, headers, body = relay_serving(lambda request: Response(200, [b"four"])).ask("HEAD", "/").answer()
    assert (status, headers["Content-Length"], body) == (200, "4", b"")


def test_many_streams_at_once_keep_their_bytes_apart(relay_serving):
    relay = relay_serving(echo)
    bodies = [os.urandom(3 * MIB // 2) for _ in range(8)]
    exchanges = [relay.begin("POST", "/%d" % i) for i in range(len(bodies))]
    for start in range(0, len(bodies[0]), 100_000):
        for exchange, body in zip(exchanges, bodies):
            exchange.chunk(body[start : start + 100_000])
    for exchange in exchanges:
        exchange.end()
    answers = [None] * len(bodies)

    def collect(i):
        answers[i] = exchanges[i].answer()

    threads = [threading.Thread(target=collect, args=(i,)) for i in range(len(bodies))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [(headers["X-Path"], body) for _, headers, body in answers] == [
        ("/%d" % i, body) for i, body in enumerate(bodies)
    ]


@pytest.mark.parametrize(
    "junk",
    [
        "not json",
        "[]",
        "1",
        "null",
        '"request"',
        "{}",
        '{"type": "request"}',
        '{"type": "new kind", "id": 1}',
        '{"type": "end", "id": 77}',
        '{"type": "abort", "id": 77}',
        '{"type": ["request"], "id": [1]}',
        '{"type": "request", "id": 0, "method": "GET", "path": "/"}',
        '{"type": "request", "id": 4294967296, "method": "GET", "path": "/"}',
        '{"type": "request", "id": -1, "method": "GET", "path": "/"}',
        '{"type": "request", "id": true, "method": "GET", "path": "/"}',
        '{"type": "request", "id": 1.5, "method": "GET", "path": "/"}',
        '{"type": "request", "id": "7", "method": "GET", "path": "/"}',
        "[" * 100_000,
        b"",
        b"abc",
        b"\0\0\0\x4dlost chunk",
        b"\0\0\0\x4d",
    ],
)
def test_a_junk_frame_is_ignored(relay_serving, junk):
    relay = relay_serving(echo)
    relay.ws.send(junk)
    assert relay.ask("POST", "/", [b"still here"]).answer()[2] == b"still here"


def test_a_request_whose_id_is_in_use_is_ignored(relay_serving):
    relay = relay_serving(echo)
    exchange = relay.begin("POST", "/first")
    relay.send(type="request", id=exchange.number, method="POST", path="/second", query="", headers=[])
    exchange.chunk(b"x")
    exchange.end()
    assert exchange.answer()[1]["X-Path"] == "/first"


def test_an_id_is_free_again_once_its_answer_has_ended(relay_serving):
    relay = relay_serving(echo)
    for turn in range(200):
        exchange = relay.begin("POST", "/%d" % turn, number=5)
        exchange.end()
        assert exchange.answer()[1]["X-Path"] == "/%d" % turn


def test_the_greatest_id_there_is_may_be_used(relay_serving):
    relay = relay_serving(echo)
    exchange = relay.begin("POST", "/", number=2**32 - 1)
    exchange.chunk(b"x")
    exchange.end()
    assert exchange.answer()[2] == b"x"


@pytest.mark.parametrize(
    "fields",
    [
        {"method": 1, "path": "/"},
        {"path": "/"},
        {"method": "GET"},
        {"method": "GET", "path": "/", "headers": [["a"]]},
        {"method": "GET", "path": "/", "headers": [["a", 1]]},
        {"method": "GET", "path": "/", "headers": [["a", "\u20ac"]]},
        {"method": "GET", "path": "/", "headers": 7},
        {"method": "GET", "path": "/", "query": {}, "headers": [7]},
    ],
)
def test_a_malformed_request_frame_is_answered_400(relay_serving, fields):
    relay = relay_serving(echo)
    relay.streams[5] = queue.Queue()
    relay.send(type="request", id=5, **fields)
    assert Exchange(relay, 5).answer()[0] == 400


def test_a_worker_that_fails_before_it_has_answered_sends_a_500(relay_serving):
    assert relay_serving(lambda request: 1 / 0).ask("GET", "/").answer()[0] == 500


def test_an_answer_that_breaks_off_is_aborted_and_closed(relay_serving, tmp_path):
    closed = Closing()
    (tmp_path / "f").write_bytes(b"short")
    body = [b"start", FileSlice(str(tmp_path / "f"), 6)]
    exchange = relay_serving(lambda request: Response(200, body, close=closed)).ask("GET", "/")
    assert exchange.start()[0] == 200
    list(exchange.pieces())
    assert exchange.ending == "abort"
    closed.wait()


def test_an_answer_is_closed_before_its_end_is_sent(relay_serving):
    closed = threading.Event()
    serving_one = relay_serving(lambda request: Response(200, [b"x"], close=closed.set))
    serving_one.ask("GET", "/").answer()
    assert closed.is_set()


def test_after_an_abort_the_body_is_disconnected_and_nothing_more_is_sent(relay_serving):
    lost = queue.Queue()
    relay = relay_serving(echo_or_tell(lost))
    exchange = relay.begin("POST", "/")
    exchange.chunk(b"x")
    exchange.abort()
    lost.get(timeout=10)
    assert relay.ask("GET", "/").answer()[0] == 200
    assert exchange.frames.empty()


def test_after_an_abort_a_running_request_goes_on_and_its_answer_is_closed_unsent(relay_serving):
    go, closed = threading.Event(), Closing()

    def answer(request):
        if request.path == "/slow":
            list(iter(request.body.read, b""))
            go.wait(10)
        return Response(200, [b"x"], close=closed)

    relay = relay_serving(answer)
    exchange = relay.ask("POST", "/slow", [b"whole"])
    exchange.abort()
    relay.ask("GET", "/").answer()
    closed.wait()
    go.set()
    closed.wait()
    assert exchange.frames.empty()


def test_an_abort_while_the_answer_is_sent_stops_it(relay_serving, tmp_path):
    closed = Closing()
    with open(tmp_path / "big", "wb") as file:
        file.truncate(256 * MIB)

    def answer(request):
        return Response(
            200, [FileSlice(str(tmp_path / "big"), 256 * MIB)] if request.path == "/big" else [], close=closed
        )

    relay = relay_serving(answer)
    exchange = relay.ask("GET", "/big")
    exchange.start()
    next(exchange.pieces())
    exchange.abort()
    sent = sum(map(len, drain_until_quiet(exchange.frames)))
    closed.wait()
    assert sent < 200 * MIB
    assert relay.ask("GET", "/").answer()[0] == 200


def drain_until_quiet(frames):
    with contextlib.suppress(queue.Empty):
        while True:
            yield frames.get(timeout=0.5)


def test_an_unread_body_does_not_hold_up_the_socket(relay_serving):
    relay = relay_serving(lambda request: error_response(WorkerError(401, "no")))
    exchange = relay.begin("POST", "/")
    assert exchange.answer()[0] == 401
    for _ in range(64):
        exchange.chunk(bytes(MIB))
    assert relay.ask("GET", "/").answer()[0] == 401


def test_a_reader_that_falls_behind_stops_the_socket_and_not_for_good(relay_serving):
    go = threading.Event()

    def answer(request):
        if request.path == "/slow":
            go.wait(20)
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    relay = relay_serving(answer)
    exchange = relay.begin("POST", "/slow")
    sent = []

    def upload():
        for _ in range(128):
            exchange.chunk(bytes(MIB))
            sent.append(None)
        exchange.end()

    uploading = threading.Thread(target=upload)
    uploading.start()
    wait_until(lambda: stands_still(sent))
    assert len(sent) < 64  # the rest waits in the relay, for the sockets' buffers are full
    go.set()
    uploading.join(20)
    assert json.loads(exchange.answer()[2]) == 128 * MIB


def stands_still(things, seconds=0.3):
    before = len(things)
    time.sleep(seconds)
    return 0 < before == len(things)


def wait_until(true, seconds=15):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_body_that_stops_is_answered_408_as_over_http(relay_serving):
    exchange = relay_serving(strata_answering(echo), stall=0.3).begin("POST", "/")
    exchange.chunk(b"x")
    assert exchange.answer()[0] == 408


def strata_answering(answer):
    def wrapped(request):
        try:
            return answer(request)
        except WorkerError as error:
            return error_response(error)

    return wrapped


def test_a_slow_reader_of_a_big_answer_does_not_delay_small_ones_for_long(relay_serving, tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    relay = relay_serving(
        lambda request: Response(
            200, [FileSlice(str(tmp_path / "big"), 64 * MIB)] if request.path == "/big" else [b"x"]
        )
    )
    big = relay.ask("GET", "/big")
    big.start()
    size = 0
    small = relay.ask("GET", "/small")
    reading = threading.Thread(target=lambda: answers.append(small.answer()))
    answers = []
    reading.start()
    for piece in big.pieces():
        size += len(piece)
        if answers:
            break
    assert answers and size < 48 * MIB  # interleaved, not after it
    list(big.pieces())


class Memory:
    """The most this process grew by while the block ran."""

    def __enter__(self):
        self.process, self.over = psutil.Process(), threading.Event()
        self.before = self.peak = self.process.memory_info().rss
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.wait(0.02):
            self.peak = max(self.peak, self.process.memory_info().rss)

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.grown = self.peak - self.before


SIZE = 1024  # MiB


def test_a_great_body_comes_in_in_flat_memory(relay_serving):
    def answer(request):
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    relay = relay_serving(answer)
    chunk = bytes(MIB)
    with Memory() as memory:
        started = time.monotonic()
        exchange = relay.ask("POST", "/", (chunk for _ in range(SIZE)))
        assert json.loads(exchange.answer()[2]) == SIZE * MIB
        print("in: %.0f MB/s" % (SIZE * MIB / 1e6 / (time.monotonic() - started)))
    assert memory.grown < 100 * MIB
    print("grown %.0f MiB" % (memory.grown / MIB))


def test_a_great_answer_goes_out_in_flat_memory(relay_serving, tmp_path):
    with open(tmp_path / "big", "wb") as file:
        file.truncate(SIZE * MIB)
    relay = relay_serving(lambda request: Response(200, [b"head", FileSlice(str(tmp_path / "big"), SIZE * MIB)]))
    with Memory() as memory:
        started = time.monotonic()
        exchange = relay.ask("GET", "/")
        exchange.start()
        assert sum(map(len, exchange.pieces())) == SIZE * MIB + 4
        print("out: %.0f MB/s" % (SIZE * MIB / 1e6 / (time.monotonic() - started)))
    assert exchange.ending == "end" and memory.grown < 100 * MIB
    print("grown %.0f MiB" % (memory.grown / MIB))


def test_small_pieces_travel_together(relay_serving):
    exchange = relay_serving(lambda request: Response(200, [b"ab"] * 1000)).ask("GET", "/")
    exchange.start()
    assert list(exchange.pieces()) == [b"ab" * 1000]


# --- Relays that come and go ------------------------------------------------------------


def test_the_relay_dies_and_comes_back(relay_serving):
    go, outcomes = threading.Event(), queue.Queue()

    def answer(request):
        if request.path != "/slow":
            return echo(request)
        outcomes.put(len(b"".join(iter(request.body.read, b""))))
        go.wait(10)
        outcomes.put("ran to its end")
        return Response(200, [b"x"], close=lambda: outcomes.put("closed"))

    relay = relay_serving(answer)
    relay.ask("POST", "/slow", [b"whole"])
    assert outcomes.get(timeout=10) == 5
    relay.ws.socket.shutdown(socket.SHUT_RDWR)
    relay.sockets.get(timeout=10)  # a new one
    assert (
        relay.ask(
            "POST",
            "/",
            [b"again"],
        ).answer()[2]
        == b"again"
    )
    go.set()
    assert [outcomes.get(timeout=10) for _ in range(2)] == ["ran to its end", "closed"]
    assert relay.ask("POST", "/", [b"again"]).answer()[2] == b"again"


def test_a_body_that_was_not_all_there_when_the_relay_died_is_disconnected(relay_serving):
    lost = queue.Queue()
    relay = relay_serving(echo_or_tell(lost))
    relay.begin("POST", "/").chunk(b"half")
    relay.ws.socket.shutdown(socket.SHUT_RDWR)
    assert lost.get(timeout=10) == "disconnected"


def test_a_relay_that_says_goodbye_is_dialled_again(relay_serving):
    relay = relay_serving(echo)
    relay.ws.close(1012)
    relay.sockets.get(timeout=10)
    assert relay.ask("POST", "/", [b"again"]).answer()[2] == b"again"


def test_a_relay_that_is_not_there_yet_is_waited_for(tell):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = Relay(echo, "ws://127.0.0.1:%d/" % port, None, 20, tell.put)
    worker.start()
    time.sleep(0.2)
    relay = RelayPeer(port)
    try:
        relay.sockets.get(timeout=10)
        assert relay.ask("POST", "/", [b"x"]).answer()[2] == b"x"
    finally:
        worker.stop()
        relay.close()
    assert tell.empty()


@pytest.mark.parametrize(
    "status, final", [(401, True), (403, True), (404, True), (408, False), (429, False), (500, False), (503, False)]
)
def test_a_handshake_answered_4xx_is_final_and_anything_else_is_tried_again(tell, status, final):
    asked = queue.Queue()

    def refuse(ws, request):
        asked.put(None)
        return ws.respond(status, "because\n")

    relay = RelayPeer(process_request=refuse)
    worker = Relay(echo, "ws://127.0.0.1:%d/?secret=1" % relay.port, None, 20, tell.put)
    worker.start()
    try:
        asked.get(timeout=10)
        if final:
            reason = tell.get(timeout=10)
            assert str(status) in reason and "because" in reason and "secret" not in reason
            worker.thread.join(5)
            assert not worker.thread.is_alive() and asked.empty()
        else:
            asked.get(timeout=10)
            assert tell.empty()
    finally:
        worker.stop()
        relay.close()


def test_a_relay_that_does_not_select_the_subprotocol_is_refused(tell):
    relay = RelayPeer(subprotocols=None)
    worker = Relay(echo, "ws://127.0.0.1:%d/" % relay.port, None, 20, tell.put)
    worker.start()
    assert SUBPROTOCOL in tell.get(timeout=10)
    worker.stop()
    relay.close()


def test_stopping_says_goodbye_and_refuses_what_comes_meanwhile(relay_serving):
    go = threading.Event()

    def answer(request):
        go.wait(10)
        return echo(request)

    relay = relay_serving(answer)
    running = relay.ask("POST", "/", [b"x"])
    relay.ask("POST", "/").frames  # noqa: B018 - has a thread before we stop
    wait_until(lambda: relay.worker.busy == 2)
    relay.worker.stop_accepting()
    assert relay.ask("GET", "/").answer()[0] == 503
    go.set()
    assert running.answer()[2] == b"x"
    relay.worker.stop()
    wait_until(lambda: relay.ws.close_code is not None)
    assert relay.ws.close_code == 1001
    assert not relay.worker.thread.is_alive()


def test_without_a_thread_to_be_had_a_request_is_refused(relay_serving, monkeypatch):
    relay, start = relay_serving(echo), threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("strata-request"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert relay.ask("GET", "/").answer()[0] == 503
    monkeypatch.undo()
    assert relay.ask("GET", "/").answer()[0] == 200
    wait_until(lambda: relay.worker.busy == 0)


def test_more_requests_than_threads_are_refused_but_not_health_and_cancel(relay_serving, monkeypatch):
    monkeypatch.setattr(strata_worker, "MAX_REQUESTS", 2)
    go = threading.Event()

    def answer(request):
        if request.path == "/slow":
            go.wait(10)
        return echo(request)

    relay = relay_serving(answer)
    slow = [relay.ask("POST", "/slow") for _ in range(2)]
    wait_until(lambda: relay.worker.busy == 2)
    assert relay.ask("POST", "/slow").answer()[0] == 503
    assert relay.ask("GET", "/health").answer()[0] == 200
    assert relay.ask("POST", "/v1/executions/b/cancel").answer()[0] == 200
    go.set()
    assert [exchange.answer()[0] for exchange in slow] == [200, 200]
    wait_until(lambda: relay.worker.busy == 0)


# --- Frames on the wire -----------------------------------------------------------------


class RawRelay:
    """A relay that sends whatever bytes a test wants, and sees what comes back frame by frame."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.port = self.listener.getsockname()[1]

    def accept(self, extra=b""):
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.sock.recv(4096)
        key = next(line.split(b": ")[1] for line in head.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        self.sock.sendall(GOOD.replace(b"ACCEPT", accept) + extra)
        self.peer = Protocol(SERVER, max_size=None)

    def frames(self):
        while True:
            data = self.sock.recv(MIB)
            if not data:
                return
            self.peer.receive_data(data)
            yield from self.peer.events_received()

    def close(self):
        self.listener.close()
        self.sock.close()


@pytest.fixture
def raw(tell):
    relay = RawRelay()
    worker = Relay(echo, "ws://127.0.0.1:%d" % relay.port, None, 20, tell.put)
    worker.start()
    yield relay
    relay.close()
    worker.stop()


REQUEST = from_server(
    TEXT, json.dumps({"type": "request", "id": 1, "method": "POST", "path": "/", "query": "", "headers": []}).encode()
)


def test_frames_right_behind_the_handshake_are_not_lost(raw):
    raw.accept(REQUEST + from_server(TEXT, b'{"type": "end", "id": 1}'))
    frames = raw.frames()
    assert json.loads(bytes(next(frames).data))["status"] == 200


def test_fragmented_and_dribbled_frames_are_answered(raw):
    raw.accept()
    head = REQUEST[4:] if REQUEST[1] == 126 else REQUEST[2:]
    data = (
        from_server(TEXT, head[:10], fin=False)
        + from_server(PING, b"?")
        + from_server(0, head[10:])
        + from_server(BINARY, b"\0\0", fin=False)
        + from_server(0, b"\0\x01he", fin=False)
        + from_server(0, b"llo")
        + from_server(TEXT, b'{"type": "end", "id": 1}')
    )
    for byte in data:
        raw.sock.sendall(bytes([byte]))
    frames = raw.frames()
    pong, response, body, end = (next(frames) for _ in range(4))
    assert (pong.opcode, bytes(pong.data)) == (PONG, b"?")
    assert json.loads(bytes(response.data))["status"] == 200
    assert bytes(body.data) == b"\0\0\0\x01hello"
    assert json.loads(bytes(end.data)) == {"type": "end", "id": 1}


@pytest.mark.parametrize("name", BROKEN)
def test_a_relay_that_breaks_the_rfc_gets_a_close_and_is_dialled_again(raw, name):
    data, code = BROKEN[name]
    raw.accept(data)
    (close,) = raw.frames()
    assert (close.opcode, int.from_bytes(bytes(close.data)[:2], "big")) == (CLOSE, code)
    raw.accept(REQUEST + from_server(TEXT, b'{"type": "end", "id": 1}'))
    assert json.loads(bytes(next(raw.frames()).data))["status"] == 200


def test_a_silent_relay_is_pinged_and_given_up(raw, monkeypatch):
    monkeypatch.setattr(strata_worker, "PING_SECONDS", 0.3)
    raw.accept()
    assert [event.opcode for event in raw.frames()] == [PING]
    raw.accept()


def test_a_relay_that_answers_pings_is_kept(raw, monkeypatch):
    monkeypatch.setattr(strata_worker, "PING_SECONDS", 0.2)
    raw.accept()
    frames = raw.frames()
    for _ in range(4):
        assert next(frames).opcode == PING
        raw.sock.sendall(from_server(PONG, b""))


def test_a_ping_is_answered_while_an_answer_is_stuck(tell, tmp_path):
    """The reader never waits for the writers: it leaves the pong to them."""
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    raw = RawRelay()
    worker = Relay(
        lambda request: Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)]),
        "ws://127.0.0.1:%d" % raw.port,
        None,
        20,
        tell.put,
    )
    worker.start()
    raw.accept(REQUEST)
    time.sleep(0.5)  # its frames fill the sockets' buffers
    raw.sock.sendall(
        from_server(PING, b"1") + from_server(PING, b"2") + from_server(TEXT, b'{"type": "abort", "id": 1}')
    )
    pongs = [bytes(event.data) for event in first_after(raw.frames(), PONG)]
    assert pongs[-1] == b"2"
    raw.close()
    worker.stop()


def first_after(frames, opcode):
    for event in frames:
        if event.opcode == opcode:
            yield event
            if bytes(event.data) == b"2":
                return


def test_a_relay_that_takes_nothing_is_given_up(tell, tmp_path):
    closed = Closing()
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)
    raw = RawRelay()
    answer = lambda request: Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)], close=closed)
    worker = Relay(answer, "ws://127.0.0.1:%d" % raw.port, None, 0.5, tell.put)
    worker.start()
    raw.accept(REQUEST)
    closed.wait()
    raw.accept()  # dialled again
    raw.close()
    worker.stop()


# --- wss --------------------------------------------------------------------------------


@pytest.fixture
def authority(monkeypatch):
    import trustme

    authority = trustme.CA()
    strata_worker.tls_context.cache_clear()
    with authority.cert_pem.tempfile() as path:
        monkeypatch.setenv("SSL_CERT_FILE", path)
        strata_worker.tls_context()
    yield authority
    strata_worker.tls_context.cache_clear()


def test_wss_carries_great_bodies_both_ways_at_once(tell, authority, tmp_path):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    relay = RelayPeer(ssl=context)
    with open(tmp_path / "big", "wb") as file:
        file.truncate(64 * MIB)

    def answer(request):
        if request.method == "GET":
            return Response(200, [FileSlice(str(tmp_path / "big"), 64 * MIB)])
        return json_response(200, sum(map(len, iter(request.body.read, b""))))

    worker = Relay(answer, "wss://127.0.0.1:%d/" % relay.port, None, 20, tell.put)
    worker.start()
    try:
        relay.sockets.get(timeout=10)
        down, up = relay.ask("GET", "/"), relay.begin("POST", "/")
        down.start()
        sizes = []
        reading = threading.Thread(target=lambda: sizes.append(sum(map(len, down.pieces()))))
        reading.start()
        for _ in range(64):
            up.chunk(bytes(MIB))
        up.end()
        assert json.loads(up.answer()[2]) == 64 * MIB
        reading.join(20)
        assert sizes == [64 * MIB]
    finally:
        worker.stop()
        relay.close()


def test_wss_with_a_certificate_of_another_host_is_not_used(tell, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("other.example").configure_cert(context)
    relay = RelayPeer(ssl=context)
    worker = Relay(echo, "wss://127.0.0.1:%d/" % relay.port, "token", 20, tell.put)
    worker.start()
    time.sleep(0.4)
    worker.stop()
    relay.close()
    assert relay.sockets.empty() and tell.empty()


class Front:
    """``with Front(relay) as url:`` - each HTTP request is forwarded over the relay's socket."""

    def __init__(self, relay):
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self):
                path, _, query = self.path.partition("?")
                with lock:
                    number = next(relay.numbers)
                exchange = relay.begin(self.command, path, self.headers.items(), number, query)
                for chunk in self.body():
                    exchange.chunk(chunk)
                exchange.end()
                status, headers = exchange.start()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for piece in exchange.pieces():
                    self.wfile.write(piece)
                self.close_connection = self.close_connection or exchange.ending == "abort"

            def body(self):
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    while size := int(self.rfile.readline(), 16):
                        for start in range(0, size, 2**20):
                            yield self.rfile.read(min(2**20, size - start))
                        self.rfile.readline()
                    self.rfile.readline()
                left = int(self.headers.get("Content-Length", 0))
                while left:
                    piece = self.rfile.read(min(left, 2**20))
                    left -= len(piece)
                    yield piece

            do_GET = do_POST = do_HEAD = do_PUT = forward

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return "http://127.0.0.1:%d" % self.server.server_port

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


# ---------------------------------------------------------------------------------------
# Listening: the other ways in, each on a real worker
# ---------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parent / "strata_worker.py"


class ListeningWorker:
    """A worker started as people start it; its log, line by line."""

    def __init__(self, *flags, **variables):
        environ = {k: v for k, v in os.environ.items() if not k.startswith("STRATA")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**environ, "STRATA_WORKER_PRELOAD": "", **variables},
        )
        self.lines = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True
        )
        self.reader.start()

    def said(self, pattern):
        wait_until(lambda: re.search(pattern, "".join(self.lines)) or self.process.poll() is not None)
        wait_until(lambda: re.search(pattern, "".join(self.lines)) or not self.reader.is_alive())
        found = re.search(pattern, "".join(self.lines))
        assert found, "".join(self.lines)
        return found

    @property
    def port(self):
        return int(self.said(r"listening on https?://[^\s]*:(\d+)").group(1))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
        self.code = self.process.wait(20)
        self.reader.join()
        self.process.stderr.close()


def push(source, build_id="b", inputs=(), timeout=30):
    """Headers and body of a push of one cell."""
    metadata = {
        "protocol_version": "v1",
        "build_id": build_id,
        "inputs": [{"name": n, "format": "json/object"} for n, _ in inputs],
        "transform": {"ref": "notebook_cell@v1", "params": {"source": source, "timeout_seconds": timeout}},
    }
    body = b""
    for name, value in [("metadata", json.dumps(metadata).encode()), *inputs]:
        body += b'--B\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n%s\r\n' % (name.encode(), value)
    return {"Content-Type": "multipart/form-data; boundary=B"}, body + b"--B--\r\n"


def manifest_of(tar):
    with tarfile.open(fileobj=io.BytesIO(tar)) as bundle:
        return json.load(bundle.extractfile("manifest.json"))


def ask(connection, method, path, body=None, headers=()):
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response.status, response.read()


# --- --connect --------------------------------------------------------------------------


@pytest.fixture
def relay():
    relay = RelayPeer()
    yield relay
    relay.close()


def connected(relay, **variables):
    return ListeningWorker("--connect", "ws://127.0.0.1:%d/w?key=hidden" % relay.port, **variables)


def test_a_real_worker_runs_cells_through_a_relay(relay):
    with connected(relay) as worker:
        relay.sockets.get(timeout=20)
        status, headers, body = relay.ask("GET", "/health").answer()
        assert (status, json.loads(body)["status"]) == (200, "healthy")
        headers, body = push("y = x + 1", inputs=[("x", b"41")])
        status, _, tar = relay.ask("POST", "/v1/execute", [body[:50], body[50:]], headers.items()).answer()
        assert status == 200 and manifest_of(tar)["success"], manifest_of(tar)
        assert manifest_of(tar)["variables"]["y"]["content_type"] == "json/object"
    assert worker.code == 0
    assert not re.search("listening|hidden", "".join(worker.lines))
    assert relay.ws.close_code == 1001


def test_a_plain_http_client_sees_the_worker_behind_a_relay(relay):
    with connected(relay), Front(relay) as url:
        relay.sockets.get(timeout=20)
        with contextlib.closing(http.client.HTTPConnection(url[7:], timeout=30)) as connection:
            headers, body = push("y = x + 1; big = 'a' * (3 << 20)", inputs=[("x", b"41")])
            connection.request("POST", "/v1/execute", iter([body[:99], body[99:]]), headers, encode_chunked=True)
            response = connection.getresponse()
            assert response.status == 200 and manifest_of(response.read())["success"]
            assert ask(connection, "GET", "/nothing?at=all")[0] == 404


def test_the_cancel_route_stops_a_cell_through_the_relay_and_an_abort_does_not(relay):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("import time; time.sleep(60)", "long")
        running = relay.ask("POST", "/v1/execute", [body], headers.items())
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1)
        running.abort()
        time.sleep(0.3)
        assert json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1
        status, _, answer = relay.ask("POST", "/v1/executions/long/cancel").answer()
        assert json.loads(answer)["cancelled"] is True
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_a_cell_outlives_the_socket_its_request_came_by(relay, tmp_path):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("import time; time.sleep(1); open(%r, 'w').close()" % str(tmp_path / "done"))
        relay.ask("POST", "/v1/execute", [body], headers.items())
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 1)
        relay.ws.socket.shutdown(socket.SHUT_RDWR)
        relay.sockets.get(timeout=20)
        wait_until((tmp_path / "done").exists)
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_a_cancel_ends_an_upload_that_has_not_ended(relay):
    with connected(relay):
        relay.sockets.get(timeout=20)
        headers, body = push("x = 1", "half")
        exchange = relay.begin("POST", "/v1/execute", [*headers.items()])
        exchange.chunk(body[:200])
        time.sleep(0.3)
        exchange.abort()
        wait_until(lambda: json.loads(relay.ask("GET", "/health").answer()[2])["active_executions"] == 0)


def test_both_tokens_are_asked_for_and_neither_reaches_a_cell(relay):
    with connected(relay, STRATA_WORKER_CONNECT_TOKEN="of-relay\n", STRATA_WORKER_TOKEN="of-worker"):
        assert relay.sockets.get(timeout=20).request.headers["Authorization"] == "Bearer of-relay"
        headers, body = push("import os; seen = sorted(k for k in os.environ if k.endswith('TOKEN'))")
        assert relay.ask("POST", "/v1/execute", [body], headers.items()).answer()[0] == 401
        headers["authorization"] = "Bearer of-worker"
        status, _, tar = relay.ask("POST", "/v1/execute", [body], headers.items()).answer()
        with tarfile.open(fileobj=io.BytesIO(tar)) as bundle:
            assert json.load(bundle.extractfile("files/seen.json")) == []


def test_a_relay_that_refuses_the_worker_ends_it_with_exit_code_1():
    relay = RelayPeer(process_request=lambda ws, request: ws.respond(403, "not yours\n"))
    with connected(relay) as worker:
        assert worker.process.wait(20) == 1
        worker.said("refused this worker: it answered 403 Forbidden: 'not yours'")
    relay.close()
    assert "hidden" not in "".join(worker.lines)


@pytest.mark.parametrize(
    "url",
    ["http://relay/", "relay:9000", "ws://", "ws://u:p@relay/", "ws://relay/#x", "ws://relay/ x", "ws://relay:99999/"],
)
def test_any_other_url_than_of_a_websocket_is_refused_at_start(url):
    with ListeningWorker("--connect", url) as worker:
        assert worker.process.wait(20) == 1
        worker.said("--connect is .*must be a ws:// or wss:// URL")


def test_a_connect_token_that_no_header_can_carry_is_refused_at_start_unshown():
    with ListeningWorker("--connect", "ws://127.0.0.1:1/", STRATA_WORKER_CONNECT_TOKEN="gehe\u00efm x") as worker:
        assert worker.process.wait(20) == 1
        worker.said(r"STRATA_WORKER_CONNECT_TOKEN is \(hidden\)")


def test_sigterm_ends_a_worker_whose_relay_is_not_there():
    with ListeningWorker("--connect", "ws://127.0.0.1:1/") as worker:
        worker.said("is not there")
    assert worker.code == 0


# --- TLS --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls_authority():
    return trustme.CA()


@pytest.fixture
def files(tls_authority, tmp_path):
    def write(*names):
        certificate = tls_authority.issue_cert(*names)
        (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        (tmp_path / "key.pem").write_bytes(certificate.private_key_pem.bytes())
        return "--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")

    return write


@pytest.fixture
def trusting(tls_authority):
    context = ssl.create_default_context()
    tls_authority.configure_trust(context)
    return context


@contextlib.contextmanager
def https(port, context):
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)) as connection:
        yield connection


def test_https_serves_cells_and_keeps_its_connections(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with https(worker.port, trusting) as connection:
            for n in range(3):
                headers, body = push("y = x * 2", inputs=[("x", b'"%s"' % (b"a" * MIB))])
                status, tar = ask(connection, "POST", "/v1/execute", body, headers)
                assert status == 200 and manifest_of(tar)["success"]
                assert ask(connection, "GET", "/health")[0] == 200
    assert worker.code == 0


def test_a_great_answer_is_whole_over_https(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with https(worker.port, trusting) as connection:
            headers, body = push("x = 'a' * (64 << 20)")
            status, tar = ask(connection, "POST", "/v1/execute", body, headers)
            started = time.monotonic()
            assert status == 200 and manifest_of(tar)["success"] and len(tar) > 64 * MIB
            print(time.monotonic() - started)


def test_a_handshake_that_dawdles_or_is_none_holds_up_nobody(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with contextlib.ExitStack() as stack:
            for junk in [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)] * 5:
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", worker.port)))
                sock.sendall(junk)
            started = time.monotonic()
            with https(worker.port, trusting) as connection:
                assert ask(connection, "GET", "/health")[0] == 200
            assert time.monotonic() - started < 2


def test_a_handshake_one_byte_at_a_time_is_made(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with socket.create_connection(("127.0.0.1", worker.port)) as sock:
            sock.settimeout(10)

            def flush():
                for byte in outgoing.read():
                    sock.sendall(bytes([byte]))

            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    flush()
                    incoming.write(sock.recv(65536))
            tls.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            flush()
            answer = b""
            while b'"healthy"' not in answer:
                incoming.write(sock.recv(65536))
                with contextlib.suppress(ssl.SSLWantReadError):
                    answer += tls.read(65536)


def test_tls_1_1_is_refused(files, trusting):
    with ListeningWorker("--port", "0", *files("127.0.0.1")) as worker:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trusting.minimum_version = ssl.TLSVersion.TLSv1
            trusting.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError), https(worker.port, trusting) as connection:
            connection.connect()


def test_a_refusal_and_a_cancelled_upload_are_answered_under_tls_too(files, trusting):
    """What shuts down one direction of the socket must not go on in the clear."""
    with ListeningWorker("--port", "0", *files("127.0.0.1"), STRATA_WORKER_STALL_SECONDS="20") as worker:
        with https(worker.port, trusting) as connection:
            assert ask(connection, "POST", "/v1/execute", b"x" * MIB, {"Content-Type": "text/plain"})[0] == 400
        with https(worker.port, trusting) as connection:
            connection.connect()
            connection.sock.sendall(b"GET / HTTP/1.1\n\n")
            assert connection.sock.recv(100).startswith(b"HTTP/1.1 400")


def test_sighup_reads_the_certificate_again_and_a_bad_one_leaves_the_old(files, trusting, tmp_path):
    flags = files("127.0.0.1", "old.example")
    with ListeningWorker("--port", "0", *flags) as worker:

        def names():
            with https(worker.port, trusting) as connection:
                connection.connect()
                return {value for _, value in connection.sock.getpeercert()["subjectAltName"]}

        assert "old.example" in names()
        with https(worker.port, trusting) as kept:
            assert ask(kept, "GET", "/health")[0] == 200
            files("127.0.0.1", "new.example")
            worker.process.send_signal(signal.SIGHUP)
            worker.said("read .* again")
            assert "new.example" in names()
            assert ask(kept, "GET", "/health")[0] == 200
        (tmp_path / "key.pem").write_text("nonsense")
        worker.process.send_signal(signal.SIGHUP)
        worker.said("the old certificate stays")
        assert "new.example" in names()


def test_a_certificate_that_is_not_to_be_used_is_one_clear_line_at_start(files, tmp_path):
    flags = files("127.0.0.1")
    for broken in (flags[:2], (*flags[:3], str(tmp_path / "absent")), (*flags[:3], flags[1])):
        with ListeningWorker("--port", "0", *broken) as worker:
            assert worker.process.wait(20) == 1
        assert re.fullmatch("strata-worker: --tls-cert .*\n", worker.lines[-1]) and "Traceback" not in "".join(
            worker.lines
        )


def test_a_token_on_an_open_address_without_tls_is_warned_of(files):
    with ListeningWorker("--port", "0", STRATA_WORKER_TOKEN="t") as worker:
        worker.said("anyone on the way can read the token")
    with ListeningWorker("--port", "0", *files("127.0.0.1"), STRATA_WORKER_TOKEN="t") as worker:
        worker.said("listening on https://127.0.0.1")
    assert "anyone" not in "".join(worker.lines)


# --- --uds ------------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self.path)


def test_a_unix_socket_serves_cells_to_its_owner_and_is_gone_at_the_end(tmp_path):
    path = str(tmp_path / "w.sock")
    with ListeningWorker("--uds", path) as worker:
        worker.said("listening on unix:" + path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with contextlib.closing(UnixConnection(path)) as connection:
            headers, body = push("x = 'a' * (1 << 20)")
            status, tar = ask(connection, "POST", "/v1/execute", body, headers)
            assert status == 200 and manifest_of(tar)["success"]
            assert ask(connection, "GET", "/health")[0] == 200
    assert worker.code == 0 and not os.path.exists(path)
    assert "anyone" not in "".join(worker.lines)


def test_a_socket_left_by_a_killed_worker_is_replaced_and_a_living_one_is_not(tmp_path):
    path = str(tmp_path / "w.sock")
    with ListeningWorker("--uds", path) as killed:
        killed.said("listening")
        killed.process.kill()
        killed.process.wait()
    assert os.path.exists(path)
    with ListeningWorker("--uds", path) as worker:
        worker.said("listening")
        with ListeningWorker("--uds", path) as second:
            assert second.process.wait(20) == 1
        second.said("strata-worker: .*--uds .*w.sock: .*in use")
        with contextlib.closing(UnixConnection(path)) as connection:
            assert ask(connection, "GET", "/health")[0] == 200


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path):
    (tmp_path / "w.sock").write_text("precious")
    with ListeningWorker("--uds", str(tmp_path / "w.sock")) as worker:
        assert worker.process.wait(20) == 1
    assert (tmp_path / "w.sock").read_text() == "precious"


# --- --exit-when-idle -------------------------------------------------------------------


def test_a_worker_without_runs_ends_with_exit_code_0():
    started = time.monotonic()
    with ListeningWorker("--port", "0", "--exit-when-idle", "1") as worker:
        assert worker.process.wait(20) == 0
        assert time.monotonic() - started >= 1
        worker.said("no run for 1 seconds")


def test_a_run_puts_the_end_off_and_questions_do_not():
    with ListeningWorker("--port", "0", "--exit-when-idle", "1") as worker:
        started = time.monotonic()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)) as connection:
            headers, body = push("import time; time.sleep(2.5)")
            assert ask(connection, "POST", "/v1/execute", body, headers)[0] == 200
        ended = time.monotonic()
        assert worker.process.wait(20) == 0
        assert ended - started >= 2.5 and 0.9 <= time.monotonic() - ended < 4


# --- WSGI -------------------------------------------------------------------------------

WAITRESS = """
import logging, sys, waitress, strata_worker
logging.basicConfig(level="INFO")
app = strata_worker.wsgi_app(token="t")
server = waitress.create_server(app, host="127.0.0.1", port=0, threads=8)
print("listening on http://127.0.0.1:%s" % server.effective_port, file=sys.stderr, flush=True)
server.run()
"""


class UnderWaitress(ListeningWorker):
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WAITRESS],
            cwd=SCRIPT.parent,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STRATA_WORKER_PRELOAD": ""},
        )
        self.lines = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")), daemon=True
        )
        self.reader.start()

    def __exit__(self, *exc_info):
        self.process.send_signal(signal.SIGINT)
        super().__exit__(*exc_info)


@pytest.fixture(scope="module")
def platform():
    with UnderWaitress() as worker:
        yield worker.port


TOKEN = {"Authorization": "Bearer t"}


def test_waitress_serves_the_worker(platform):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        assert ask(connection, "GET", "/health")[0] == 200
        headers, body = push("y = x * 2; z = 'a' * (8 << 20)", inputs=[("x", b'"%s"' % (b"a" * MIB))])
        assert ask(connection, "POST", "/v1/execute", body, headers)[0] == 401
        status, tar = ask(connection, "POST", "/v1/execute", body, {**headers, **TOKEN})
        assert status == 200 and manifest_of(tar)["success"] and len(tar) > 10 * MIB
        status, answer = ask(connection, "GET", "/nothing", headers=TOKEN)
        assert status == 404 and json.loads(answer)["detail"]
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        assert response.status == 200 and int(response.headers["Content-Length"]) > 0 and response.read() == b""


def test_a_chunked_body_is_read_to_its_end_under_waitress(platform):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        headers, body = push("y = x", inputs=[("x", b"1")])
        connection.request(
            "POST", "/v1/execute", iter([body[:100], body[100:]]), {**headers, **TOKEN}, encode_chunked=True
        )
        response = connection.getresponse()
        assert response.status == 200 and manifest_of(response.read())["success"]


def test_the_cancel_route_works_under_waitress(platform):
    outcome = queue.Queue()

    def run():
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
            headers, body = push("import time; time.sleep(60)", "a b")
            outcome.put(ask(connection, "POST", "/v1/execute", body, {**headers, **TOKEN})[0])

    threading.Thread(target=run).start()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", platform, timeout=30)) as connection:
        cancel = lambda: json.loads(ask(connection, "POST", "/v1/executions/a%20b/cancel", headers=TOKEN)[1])[
            "cancelled"
        ]
        wait_until(cancel)
    assert outcome.get(timeout=20) in (409, 500)


def test_a_body_that_ends_early_is_no_run_for_wsgi():
    import strata_worker

    environ = {"REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO(b"abc"), "CONTENT_LENGTH": "10"}
    body = strata_worker.wsgi_request(environ).body
    assert body.read() == b"abc"
    with pytest.raises(strata_worker.Disconnected):
        body.read()


def test_a_response_is_closed_when_the_wsgi_server_closes_it():
    import strata_worker

    closed = []
    response = strata_worker.Response(200, [b"a", b"b"], close=lambda: closed.append(1))
    environ = {"REQUEST_METHOD": "GET", "wsgi.input": io.BytesIO()}
    answer = strata_worker.wsgi_call(lambda request: response, environ, lambda status, headers: None)
    assert list(answer) == [b"ab"] and not closed
    answer.close()
    assert closed

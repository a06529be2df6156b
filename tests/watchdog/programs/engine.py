"""A small real HTTP engine that speaks SGLang's and vLLM's endpoints and can be broken on request.

    engine.py KIND PORT [--start-delay S] [--busy S]

POST /fault {"mode": "503" | "dead-generate" | "reset" | "hang"} breaks it; the mode stays.
"""

import argparse
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["sglang", "vllm"])
parser.add_argument("port", type=int)
parser.add_argument("--start-delay", type=float, default=0.0)
parser.add_argument("--name", default="tiny")
options = parser.parse_args()
state = {"mode": "", "tokens": 0, "requests": 0}
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self, body, status=200, kind="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def broken(self, generate=False):
        mode = state["mode"]
        if mode == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return True
        if mode == "503":
            self.answer({"error": "Service Unavailable"}, 503)
            return True
        if mode == "hang" or (mode == "dead-generate" and generate):
            time.sleep(3600)
        return False

    def generate(self, reply):
        if self.broken(generate=True):
            return
        with lock:
            state["tokens"] += 8
            state["requests"] += 1
        self.answer(reply)

    def do_GET(self):
        if self.path == "/health_generate" and options.kind == "sglang":
            self.generate("")
            return
        if self.broken():
            return
        if self.path == "/health":
            self.answer("")
        elif self.path == "/server_info" and options.kind == "sglang":
            self.answer({"model_path": options.name, "version": "0.5.16"})
        elif self.path == "/version" and options.kind == "vllm":
            self.answer({"version": "0.32.0"})
        elif self.path == "/v1/models":
            self.answer({"object": "list", "data": [{"id": options.name}]})
        elif self.path == "/metrics":
            name = options.kind
            requests = "num_requests_total" if name == "sglang" else "request_success_total"
            self.answer(
                f'{name}:generation_tokens_total{{model_name="x"}} {state["tokens"]}\n'
                f'{name}:{requests}{{model_name="x"}} {state["requests"]}\n',
                kind="text/plain",
            )
        else:
            self.answer({"error": "not found"}, 404)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/fault":
            state["mode"] = json.loads(body)["mode"]
            self.answer({})
        elif self.path == "/generate" and options.kind == "sglang":
            self.generate({"text": " a", "meta_info": {"completion_tokens": 1}})
        elif self.path == "/v1/completions":
            self.generate({"choices": [{"text": " a"}]})
        elif self.broken():
            return
        else:
            self.answer({"error": "not found"}, 404)


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, *arguments):
        pass


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
time.sleep(options.start_delay)
server = Server(("127.0.0.1", options.port), Handler)
print(f"INFO:     Uvicorn running on http://127.0.0.1:{options.port} (Press CTRL+C to quit)", flush=True)
print("The server is fired up and ready to roll!", file=sys.stderr, flush=True)
server.serve_forever()

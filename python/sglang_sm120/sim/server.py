"""Start, question and stop a real SGLang server on this machine.

The server is `python -m sglang.launch_server` in its own session; nothing of SGLang is imported here. It runs on
the CPU platform `sm120_sim` unless the caller's environment says otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_sm120.sim.environment import free_port, server_environment

# What every server of the CPU rig gets: small pools, no graphs, no grammar engine, no warm-up request.
BASE_FLAGS: tuple[str, ...] = (
    "--device",
    "cpu",
    "--mem-fraction-static",
    "0.1",
    "--max-total-tokens",
    "8192",
    "--max-running-requests",
    "16",
    "--skip-server-warmup",
    "--grammar-backend",
    "none",
)


class ServerError(RuntimeError):
    """The server did not start, died, or answered with an error; the message carries the end of its log."""


@dataclass(frozen=True)
class Generation:
    """One answer of `/generate`.

    `text` is the new text, `output_ids` its token ids, `meta` SGLang's `meta_info`.
    """

    text: str
    output_ids: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify pass of this request, the bonus token included; None without speculation."""
        value = self.meta.get("spec_accept_length")
        return None if value is None else float(value)

    @property
    def verify_passes(self) -> int:
        """Verify passes that served this request; 0 without speculation."""
        return int(self.meta.get("spec_verify_ct") or 0)


def eagle3_flags(
    drafter: Path | str, *, steps: int = 3, topk: int = 1, draft_tokens: int = 4
) -> list[str]:
    """Flags that switch EAGLE-3 on.

    Args:
        drafter: Directory of the drafter's checkpoint.
        steps: Draft steps per iteration.
        topk: Branches per draft step; 1 is a chain.
        draft_tokens: Rows per request in one verify pass.
    """
    return [
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        str(drafter),
        "--speculative-num-steps",
        str(steps),
        "--speculative-eagle-topk",
        str(topk),
        "--speculative-num-draft-tokens",
        str(draft_tokens),
    ]


class SimServer:
    """One SGLang server; a context manager that starts it and always stops it.

    Args:
        model: Directory of the target's checkpoint.
        flags: More flags for `sglang.launch_server`; later ones win over `BASE_FLAGS`.
        tp: Tensor-parallel ranks.
        env: Environment variables to set over the caller's; a value of None removes the variable.
        log: File for stdout and stderr; a temporary one if None.
        start_timeout_s: Seconds until the server must be ready.

    Example:
        with SimServer(model, ["--enable-sm120-fusion"]) as server:
            print(server.generate(["The "], max_new_tokens=32)[0].text)
    """

    def __init__(
        self,
        model: Path | str,
        flags: Sequence[str] = (),
        *,
        tp: int = 2,
        env: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        start_timeout_s: float = 900.0,
    ) -> None:
        self.model = Path(model).resolve()  # the server runs in another folder
        self.tp = tp
        self.start_timeout_s = start_timeout_s
        self.port = free_port()
        self.startup_s: float | None = None
        self._flags = list(flags)
        self._env = server_environment(env or {})
        if log is None:
            handle, name = tempfile.mkstemp(prefix="sglang-sm120-server-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        # Plain HTTP to this machine: certificates and proxies would only cost time.
        self._http = httpx.Client(
            base_url=self.url,
            verify=False,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """The launch line."""
        return [
            sys.executable,
            "-m",
            "sglang.launch_server",
            "--model-path",
            str(self.model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--tp",
            str(self.tp),
            *BASE_FLAGS,
            *self._flags,
        ]

    @property
    def pid(self) -> int:
        """Process id of the launcher.

        Raises:
            ServerError: The server was never started.
        """
        if self._process is None:
            raise ServerError("the server was not started; call start() first")
        return self._process.pid

    def spawn(self) -> None:
        """Start the process and return at once; `wait_ready` or `wait_exit` comes next."""
        if self._process is not None:
            raise ServerError("this SimServer was started before; make a new one")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        atexit.register(self.stop)

    def start(self) -> SimServer:
        """Start the server and wait until it answers.

        Raises:
            ServerError: It ended early or was not ready in time; it is stopped before the error leaves.
        """
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Wait until `/health` answers 200, at most `start_timeout_s` seconds since this call."""
        began = time.monotonic()
        try:
            while True:
                self._raise_if_ended()
                with contextlib.suppress(httpx.TransportError):
                    if self._http.get("/health", timeout=30.0).status_code == 200:
                        break
                if time.monotonic() - began > self.start_timeout_s:
                    self._ask_for_stacks()
                    raise ServerError(
                        f"the server was not ready after {self.start_timeout_s:.0f} s.\n{self.tail()}"
                    )
                time.sleep(0.5)
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - began

    def wait_exit(self, timeout_s: float) -> int:
        """Wait until the launcher ends by itself and return its exit status.

        Raises:
            ServerError: It still runs after `timeout_s` seconds.
        """
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"the server still ran after {timeout_s:.0f} s.\n{self.tail()}"
            ) from None

    def _ask_for_stacks(self) -> None:
        """Have the ranks print their Python stacks to the log, if they run with --sm120-shared-gpu."""
        if "--sm120-shared-gpu" not in self._flags:
            return
        for rank in range(self.tp):
            with contextlib.suppress(ServerError, psutil.NoSuchProcess):
                self.scheduler(rank).send_signal(signal.SIGUSR2)
        time.sleep(1.0)

    def _raise_if_ended(self) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server ended with status {status}.\n{self.tail()}")

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def children(self) -> list[psutil.Process]:
        """Every live descendant of the launcher (schedulers, detokenizer, helpers)."""
        if self._process is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def scheduler(self, rank: int) -> psutil.Process:
        """The scheduler process of one tensor-parallel rank.

        Raises:
            ServerError: There is no such process.
        """
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                title = " ".join(child.cmdline())
                if "scheduler" in title and (f"TP{rank}" in title or self.tp == 1):
                    return child
        raise ServerError(f"no scheduler process of rank {rank} among the server's children")

    def stop(self, grace_s: float = 8.0) -> None:
        """End the launcher and all its children; idempotent.

        Args:
            grace_s: Seconds the launcher gets to end its children itself before all are killed.
        """
        process = self._process
        if process is None or self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        family = self.children()
        # Only the launcher is asked: SGLang takes a signal to a scheduler for a crash and stays to diagnose it.
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        psutil.wait_procs(family, timeout=10.0)

    def __enter__(self) -> SimServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def log_text(self) -> str:
        """Everything the server has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log, very long ones cut, with its place."""
        last = (line[:500] for line in self.log_text().splitlines()[-lines:])
        return "\n".join([f"log: {self.log}", *last])

    def request(
        self, method: str, path: str, body: object = None, *, timeout_s: float = 300.0
    ) -> Any:
        """One HTTP request to the server; the decoded JSON answer.

        Raises:
            ServerError: No connection, a status other than 200, or a dead server.
        """
        try:
            answer = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TransportError as error:
            raise ServerError(
                f"{method} {path} failed: {type(error).__name__}: {error}.\n{self.tail()}"
            ) from error
        if answer.status_code != 200:
            raise ServerError(
                f"{method} {path} gave status {answer.status_code}: {answer.text[:2000]}\n{self.tail(15)}"
            )
        return answer.json()

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        concurrency: int = 1,
        temperature: float = 0.0,
        **sampling: object,
    ) -> list[Generation]:
        """Send prompts (texts or token ids) to `/generate`, `concurrency` of them at a time; answers in order.

        `ignore_eos` is on unless `sampling` says otherwise, so every answer has `max_new_tokens` tokens.
        """
        params = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            **sampling,
        }

        def one(prompt: str | Sequence[int]) -> Generation:
            key = "text" if isinstance(prompt, str) else "input_ids"
            value = prompt if isinstance(prompt, str) else list(prompt)
            answer = self.request("POST", "/generate", {key: value, "sampling_params": params})
            return Generation(answer["text"], tuple(answer["output_ids"]), answer["meta_info"])

        with ThreadPoolExecutor(max_workers=concurrency) as pool:
            return list(pool.map(one, prompts))

    def complete(
        self, prompt: str, *, max_tokens: int, temperature: float = 0.0, **extra: object
    ) -> dict[str, Any]:
        """One request to the OpenAI-compatible `/v1/completions`; the whole JSON answer."""
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            **extra,
        }
        return self.request("POST", "/v1/completions", body)

    def info(self) -> dict[str, Any]:
        """SGLang's `/server_info`: resolved options, and `internal_states` of the schedulers."""
        return self.request("GET", "/server_info")

    def accept_length(self) -> float | None:
        """Mean accept length over everything served so far; None without speculation."""
        states = self.info().get("internal_states") or [{}]
        value = states[0].get("avg_spec_accept_length")
        return None if value is None else float(value)

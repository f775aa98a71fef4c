"""Two processes that run functions together: gloo, met over a file.

    with Ranks(folder) as ranks:
        first, second = ranks.run(function, *args)      # function(rank, *args), importable by name, in both

The processes live for many calls, as importing torch takes longer than most of them. A call that hangs fails after its
time, and the processes are replaced.
"""

from __future__ import annotations

import datetime
import io
import multiprocessing
import pathlib
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

__all__ = ["SIZE", "Ranks"]

SIZE = 2


class Ranks:
    def __init__(self, folder: pathlib.Path) -> None:
        self._folder, self._started = folder, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def run(self, body: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
        """What `body(rank, *args)` returns, of each rank; the first rank's exception is an AssertionError here."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, args))
        deadline, answers = time.monotonic() + seconds, []
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
            try:
                if not pipe.poll(max(deadline - time.monotonic(), 0)):
                    raise AssertionError(f"rank {rank} did not answer within {seconds} s")
                answers.append(pipe.recv())
            except (AssertionError, EOFError) as error:
                state = f"exit code {process.exitcode}"
                self._stop()
                raise AssertionError(f"{_name(body)}, rank {rank} ({state}): {error}") from None
        failed = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            self._stop()  # the other one may wait in a collective
            raise AssertionError("\n".join(f"{_name(body)}, rank {rank}:\n{text}" for rank, text in failed))
        return [torch.load(io.BytesIO(answer), weights_only=False) for _, answer in answers]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._started += 1
        meeting = self._folder / f"meeting_{self._started}"
        for rank in range(SIZE):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, meeting, there), daemon=True)
            process.start()
            there.close()  # or a process that died would never end the stream
            self._processes.append(process)
            self._pipes.append(here)

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(rank: int, meeting: pathlib.Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        try:
            torch._dynamo.reset()
            made = io.BytesIO()
            torch.save(body(rank, *args), made)
            pipe.send((True, made.getvalue()))
        except Exception:
            pipe.send((False, traceback.format_exc()))


def _name(body: Callable[..., Any]) -> str:
    return getattr(body, "__name__", repr(body))

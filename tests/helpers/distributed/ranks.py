"""Processes that run functions together: gloo on the CPU, or NCCL with a GPU each; met over a file.

    with Ranks(folder) as ranks:                        # Ranks(folder, "cuda") on GPUs, Ranks(folder, size=4) for more than two
        first, second = ranks.run(function, *args)      # function(rank, *args), importable by name, in each

The processes live for many calls, as importing torch takes longer than most of them. A call that hangs fails after its
time, and the processes are replaced.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import pathlib
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from helpers.dynamo import collect_no_garbage, few_rows_too, time_no_guards

SIZE = 2
"""How many processes share a batch or a weight."""

IMPORTED = ["te_dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
"""What most bodies need, and takes seconds."""


def device() -> torch.device:
    """In a rank: where its tensors are."""
    on_gpu = torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.distributed.get_rank()) if on_gpu else torch.device("cpu")


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """In a rank: its device mesh, of all ranks in one dimension if no shape is given. Left to itself torch takes a GPU's
    wherever there is one, whatever the processes meet over."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, shape or (torch.distributed.get_world_size(),), mesh_dim_names=names)


class Ranks:
    def __init__(self, folder: pathlib.Path, device_type: str = "cpu", size: int = SIZE) -> None:
        self._folder, self._device_type, self._size, self._started = folder, device_type, size, 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop(seconds=10)

    def run(self, body: Callable[..., Any], *args: Any, seconds: float = 120) -> list[Any]:
        """What `body(rank, *args)` returns, of each rank; the first rank's exception is an AssertionError here."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that died says so instead of an answer
                pipe.send((body, args))
        answers = self._answers(seconds)
        failed = [(rank, text) for rank, (ok, text) in sorted(answers.items()) if not ok]
        if failed:
            self._stop()  # the others may wait in a collective
            raise AssertionError("\n".join(f"{_name(body)}, rank {rank}:\n{text}" for rank, text in failed))
        return [
            torch.load(io.BytesIO(answers[rank][1]), map_location="cpu", weights_only=False)
            for rank in range(self._size)
        ]

    def _answers(self, seconds: float) -> dict[int, tuple[bool, Any]]:
        """(whether it is a result, the result or what went wrong) of each rank. Once one has failed the others have few seconds left:
        they may wait for it in a collective."""
        deadline, answers = time.monotonic() + seconds, dict[int, tuple[bool, Any]]()
        while missing := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}:
            ready = wait(list(missing), max(deadline - time.monotonic(), 0))
            for pipe, rank in missing.items():
                if pipe in ready:
                    answers[rank] = self._answer(rank, pipe)
                elif not ready:
                    answers[rank] = (False, "did not answer in time")
            if not all(ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + 5)
        return answers

    def _answer(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pipe.recv()
        except (EOFError, OSError):
            self._processes[rank].join(2)
            words = self._stderr(rank).read_text(errors="replace")[-3000:]
            return False, f"ended with exit code {self._processes[rank].exitcode}; the end of its stderr:\n{words}"
        return answer

    def _stderr(self, rank: int) -> pathlib.Path:
        return self._folder / f"stderr_{self._started}_{rank}.txt"

    def _start(self) -> None:
        # On the CPU torch is imported once, by a process that the others are forked from. CUDA must not be there before a fork.
        context = multiprocessing.get_context("spawn" if self._device_type == "cuda" else "forkserver")
        if self._device_type != "cuda":
            context.set_forkserver_preload(IMPORTED)
        self._started += 1
        meeting = self._folder / f"meeting_{self._started}"
        for rank in range(self._size):
            here, there = context.Pipe()
            of_this = (rank, self._size, self._device_type, meeting, there, self._stderr(rank))
            process = context.Process(target=_serve, args=of_this, daemon=True)
            process.start()
            there.close()  # or a process that died would never end the stream
            self._processes.append(process)
            self._pipes.append(here)

    def _stop(self, seconds: float = 2) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(
    rank: int, size: int, device_type: str, meeting: pathlib.Path, pipe: Connection, stderr: pathlib.Path
) -> None:
    # C++ writes to the descriptor, faulthandler adds where Python was when a signal ended the process.
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable(all_threads=True)
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", rank) if device_type == "cuda" else None,
    )
    with collect_no_garbage(), time_no_guards(), few_rows_too(), contextlib.suppress(EOFError):
        while True:
            body, args = pipe.recv()
            try:
                torch._dynamo.reset()
                made = io.BytesIO()
                torch.save(body(rank, *args), made)
                pipe.send((True, made.getvalue()))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    if device_type == "cuda":
        torch.distributed.destroy_process_group()


def _name(body: Callable[..., Any]) -> str:
    return getattr(body, "__name__", repr(body))

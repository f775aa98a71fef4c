"""Launches whose compiled kernel is remembered: by device, constants and the kind of each argument, which is all that it depends on.

Triton finds the compiled kernel again at each launch: it binds the arguments, and makes one string of them and of the options. That
costs the CPU more than the launch. No address is remembered, and what a launch runs on is asked each time. Where somebody wants what
Triton does at its own launches alone (hooks, debugging), and for arguments of other kinds or of another device, it launches. What it
checks besides, that no global which a kernel reads has changed, it checks at the first launch: those of our kernels are constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dynamo.kernels.runtime._triton import triton
from te_dynamo.kernels.runtime.scratch import scratch

_PADDING = ((), (1, 1), (1,), ())
"""What a grid of so many dimensions lacks."""


class Prepared:
    """A kernel with its constants: constant parameters and compile options, all hashable."""

    def __init__(self, kernel: Any, constants: Mapping[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self._options = launched_early(constants)
        self._unread = (None,) * sum(name in constants for name in kernel.arg_names)
        self._bind: Callable[..., Any] = lambda *_: None
        self._launchers: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}  # of each compiled kernel, and what it wants

    def run(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """kernel[grid](*args, **constants) on the current device and stream; args: its other parameters, in its order."""
        if self.kernel.pre_run_hooks or triton_is_watched():
            self._run_by_triton(grid, args)
            return
        active = triton.runtime.driver.active
        device = active.get_current_device()
        bound = self._bind(device, *args)
        if bound is None:
            self._bind = bind = binder(tuple(map(type, args)))  # another thread may put its own there
            bound = bind(device, *args)
        key, values = bound
        known = self._launchers.get(key)
        if known is None:
            compiled = self._run_by_triton(grid, args)
            if compiled is not None and key is not None:  # None: a hook of Triton's refuses to compile
                self._launchers[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = known
        triton.set_allocator(scratch)  # each thread has its own
        stream = active.get_current_stream(device)
        run(*grid, *_PADDING[len(grid)], stream, function, metadata, None, None, None, *values, *self._unread)

    def _run_by_triton(self, grid: tuple[int, ...], args: Sequence[Any]) -> Any:
        triton.set_allocator(scratch)
        return self.kernel[grid](*args, **self._options)


def launched_early(constants: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of a launch of its own, which has EARLY as an attribute too."""
    return {**constants, "launch_pdl": True} if constants.get("EARLY") else dict(constants)


def prepared_of(kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Prepared, Sequence[Any]]:
    """kernel[...](*args, **kwargs) as (the kernel with its constants, its other arguments in its order)."""
    form = id(kernel), len(args), *kwargs
    spelling = _spellings.get(form)
    if spelling is None:
        spelling = _spellings[form] = _Spelling(kernel, len(args), tuple(kwargs))
    return spelling.read((*args, *kwargs.values()))


class _Spelling:
    """Launches of one kernel that give the same arguments by position and by name."""

    def __init__(self, kernel: Any, positional: int, names: tuple[str, ...]) -> None:
        given = (*kernel.arg_names[:positional], *names)
        own = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
        self._kernel = kernel
        self._own = [given.index(name) for name in own]
        self._constants = {name: i for i, name in enumerate(given) if name not in own}
        self._prepared: dict[tuple[Any, ...], Prepared] = {}

    def read(self, values: Sequence[Any]) -> tuple[Prepared, list[Any]]:
        constants = [values[i] for i in self._constants.values()]
        key = *constants, *map(type, constants)  # 1, 1.0 and True are equal, and compile to different code
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = Prepared(self._kernel, dict(zip(self._constants, constants, strict=True)))
        return prepared, [values[i] for i in self._own]


_spellings: dict[tuple[Any, ...], _Spelling] = {}


@functools.cache
def binder(types: tuple[type, ...]) -> Callable[..., Any]:
    """A function (device, *args) -> (key, values) for arguments of these types, or None if they are of others.

    key:    what the compiled kernel depends on. None where Triton has to look each time: at a tensor of another device, at an
            integer of more than 32 bits, at anything but tensors, integers, floats, bools and None.
    values: what the compiled kernel's launcher takes: addresses and numbers.

    It is written out, as Triton's is: a loop takes twice the time.
    """
    kinds = {f"x{i}": kind for i, kind in enumerate(types)}
    tensors = [x for x, kind in kinds.items() if issubclass(kind, torch.Tensor)]
    integers = [x for x, kind in kinds.items() if kind is int]
    known = all(x in tensors or kind in (int, float, bool, type(None)) for x, kind in kinds.items())
    here = [f"{x}.get_device() == device" for x in tensors] + [f"-0x80000000 <= {x} < 0x80000000" for x in integers]
    aligned = ", ".join(f"{x}_ % 16 == 0" for x in tensors)
    key = [f"{x}.dtype" for x in tensors] + [f"2 if {x} == 1 else {x} % 16 == 0" for x in integers]
    lines = [
        f"def bind(device, {', '.join(kinds)}):",
        f" if {' or '.join(f'type({x}) is not {x}_type' for x in kinds)}: return None",
        f" if not ({' and '.join([str(known), *here])}): return None, ()",
        *(f" {x}_ = {x}.data_ptr()" for x in tensors),
        f" aligned = ({' | '.join(['0', *(f'{x}_' for x in tensors)])}) % 16 == 0 or ({aligned})",
        f" return (bind, device, aligned, {', '.join(key)}), ({', '.join(x + '_' * (x in tensors) for x in kinds)},)",
    ]
    scope: dict[str, Any] = {f"{x}_type": kind for x, kind in kinds.items()}
    exec("\n".join(lines), scope)
    return scope["bind"]  # type: ignore[no-any-return]


def triton_is_watched() -> bool:
    """Whether hooks want to see Triton's launches, or Triton is told to compile in another way than before."""
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        getattr(enter, "calls", enter)  # a chain of hooks is true, empty or not
        or getattr(leave, "calls", leave)
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or compilation.instrumentation_mode
    )

"""What Dynamo does with a model that one of our tools compiles: seen by the tool, and gone afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, TypeVar
from unittest import mock

import torch

from te_dynamo.errors import UnsupportedError
from te_dynamo.torch_private.recompile_limit import the_rest
from te_dynamo.torch_private.table import DYNAMO_STATE
from te_dynamo.user_code import traced_code


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo split the model, or gave a function up: "file.py:17" ("" where unknown) and its reason, as `cause_of` words it."""

    source: str
    reason: str


class Seen:
    """What Dynamo did since: of `dynamo_untouched` inside of it."""

    def __init__(self) -> None:
        self.breaks: list[GraphBreak] = []
        """the graph breaks behind which it went on; known when the context is left"""
        self.visited: set[CodeType] = set()
        """the code that it was asked to compile, likewise"""
        self.compiled: set[CodeType] = set()
        self.known: set[CodeType] = set()
        """the code that it had been asked to compile before"""
        self.unsupported = _Unsupported()
        self.limit: int = torch._dynamo.config.recompile_limit

    @property
    def skipped(self) -> dict[CodeType, GraphBreak]:
        """The code that it gave up as a whole, and ran as it is: where, and why."""
        return {code: stop for code, stop in self.unsupported.last.items() if code not in self.compiled}

    def past_limit(self, code: CodeType) -> CodeType | None:
        """The code that ran and was compiled as often as Dynamo may, so that it runs as it is for other inputs: that of a function, or what
        Dynamo made of it behind a graph break."""
        lines = {line for _, _, line in code.co_lines()}
        for each in (code, *(known for known in self.known if the_rest(known))):
            there = [entry for entry in _entries(each) if entry.code is not None] if DYNAMO_STATE.active else ()
            of_it = each.co_filename == code.co_filename and each.co_firstlineno in {code.co_firstlineno, *lines}
            if of_it and each not in self.visited and len(there) >= self.limit:
                return each
        return None


Function = TypeVar("Function", bound=Callable[..., Any])

_lock = threading.RLock()


def one_at_a_time(function: Function) -> Function:
    """`function`, for which other threads wait: it changes tables of torch's that all threads have. UnsupportedError where a backend calls it
    beside another thread's, which may wait for that compilation."""

    @functools.wraps(function)
    def alone(*args: Any, **kwargs: Any) -> Any:
        if not _lock.acquire(blocking=traced_code() is None):
            raise UnsupportedError(
                "te_dynamo: explain, compare or capture_on_fake_cuda runs in another thread: call it outside of a compilation, where it can wait"
            )
        try:
            return function(*args, **kwargs)
        finally:
            _lock.release()

    return alone  # type: ignore[return-value]


@contextlib.contextmanager
def dynamo_untouched() -> Iterator[Seen]:
    """Inside, Dynamo has seen no size of an input before, has given up no function, and compiles however often it has. Afterwards its tables
    are what they were: sizes, counters, graph breaks, and the code that it has compiled and may still compile.

    What is left: of code that had been compiled before, an empty entry for each time. Lookups pass it by, and of the two limits it counts
    towards `accumulated_recompile_limit` (256) alone.
    """
    seen = Seen()
    breaks = _graph_break_log()
    breaks_before = len(breaks)
    try:
        with _tables_of_its_own(seen) if DYNAMO_STATE.active else contextlib.nullcontext():
            yield seen
    finally:
        seen.breaks = [_graph_break(entry) for entry in breaks[breaks_before:]]
        del breaks[breaks_before:]


@contextlib.contextmanager
def _tables_of_its_own(seen: Seen) -> Iterator[None]:
    from torch._dynamo import convert_frame, pgo
    from torch._dynamo.eval_frame import reset_code
    from torch._dynamo.utils import counters

    known = seen.known = _alive(convert_frame.input_codes)
    entries = {code: {id(entry.guard_manager) for entry in _entries(code)} for code in known}
    given_up = {code for code, had in entries.items() if not had}
    for code in given_up:
        reset_code(code)  # it is tried again
    compiled = seen.compiled
    counts = dict(counters)
    counters.clear()
    counters["unimplemented"] = seen.unsupported
    sizes = pgo.get_code_state()  # of inputs, by code: what differs from call to call is compiled as a symbol
    sizes_before = dict(sizes)
    sizes.clear()
    hook = convert_frame.register_bytecode_hook(lambda code, _: compiled.add(code))
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=1 << 30, accumulated_recompile_limit=1 << 30),
            mock.patch.object(convert_frame, "input_codes", convert_frame.Tracker()),
        ):
            try:
                yield
            finally:
                seen.visited = _alive(convert_frame.input_codes)
    finally:
        hook.remove()
        sizes.clear()
        sizes.update(sizes_before)
        counters.clear()
        counters.update(counts)
        for code in seen.visited | compiled:
            if entries.get(code):
                _drop_entries(code, entries[code])
                if code not in compiled:
                    _give_another_try(code)
            elif code in compiled or code not in given_up:
                reset_code(code)


class _Unsupported(Counter[str]):
    """Dynamo's own counts of what it does not support. What it goes on behind it takes out again, as a graph break.

    last: the last one that is in, of each code that was compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[CodeType, GraphBreak] = {}
        self._messages: dict[CodeType, str] = {}

    def __setitem__(self, message: str, times: int) -> None:
        traced = traced_code()
        if times < self[message]:
            for code in [code for code, last in self._messages.items() if last == message]:
                del self.last[code], self._messages[code]
        elif traced is not None:
            stack = torch._guards.TracingContext.extract_stack()
            self.last[traced] = GraphBreak(place_of(stack[-1]) if stack else "", cause_of(message))
            self._messages[traced] = message
        super().__setitem__(message, times)


class _MatchesNothing:
    """What an entry without code says that its inputs were: no frame has such, so Dynamo counts it as no compilation of the frame's."""


_NOTHING = _MatchesNothing()


def _drop_entries(code: CodeType, keep: set[int]) -> None:
    """Frees what was compiled of `code` but for the entries whose guards have these ids."""
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    for entry in _entries(code):
        guards: Any = entry.guard_manager
        if id(guards) not in keep:
            nothing = DeletedGuardManagerWrapper("te_dynamo looked at the model")
            nothing.id_matched_objs = {"": weakref.ref(_NOTHING)}
            guards.extra_state.invalidate(entry, nothing)


def _give_another_try(code: CodeType) -> None:
    from torch._C._dynamo.eval_frame import _FrameExecStrategy, set_code_exec_strategy

    set_code_exec_strategy(code, _FrameExecStrategy())


_HELPS = {
    "output shape depends on": "torch.compile(..., fullgraph=True) traces it too; as F.grouped_mm a mixture's experts need neither",
}
"""What helps beside Dynamo's own hint, by what is in its message."""


def cause_of(message: str) -> str:
    """What Dynamo does not support, in a line: of a break that the user wrote its message, else Dynamo's explanation and first hint."""
    lines = [line.strip() for line in message.partition("\n\n*** While handling")[0].splitlines()]
    explained, hints = (
        [line.removeprefix(name) for line in lines if line.startswith(name)] for name in ("Explanation: ", "Hint: ")
    )
    helps = [text for part, text in _HELPS.items() if part in message]
    said = [_message(lines)] if _message(lines) else [*(explained[:1] or lines[:1]), *hints[:1], *helps]
    return ". ".join(text.removesuffix(" Message: None").rstrip(". ") for text in said)


def _message(lines: Iterable[str]) -> str:
    """Of a deliberate break, "" where it was given none."""
    message = next((line.partition("Message: ")[2] for line in lines if "Message: " in line), "")
    return "" if message == "None" else message


def place_of(frame: Any) -> str:
    """ "file.py:17" of a line of a stack."""
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"


def _entries(code: CodeType) -> list[Any]:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(code)


def _alive(codes: Any) -> set[CodeType]:
    references: Iterable[weakref.ref[CodeType]] = codes.seen
    return {code for reference in references if (code := reference()) is not None}


def _graph_break_log() -> list[Any]:
    """Dynamo's own. Raises UnsupportedError where this torch keeps none: no breaks would be shown where there are some."""
    try:
        return torch._dynamo.utils.graph_break_reasons
    except AttributeError as error:
        raise UnsupportedError(
            f"te_dynamo.explain: torch {torch.__version__} has no torch._dynamo.utils.graph_break_reasons, which lists the graph breaks: "
            "install a release that has it (2.11 to 2.15), or look at the model by te_dynamo.capture, which needs none"
        ) from error


def _graph_break(entry: Any) -> GraphBreak:
    return GraphBreak(place_of(entry.user_stack[-1]) if entry.user_stack else "", cause_of(str(entry.reason)))

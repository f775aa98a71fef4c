"""Every difference between the supported releases of torch (2.11 to 2.15) and Triton (3.6 to 3.9), in one place.

Each function names the release that needs it. Nothing else in the package asks for a version, but for kernels, which know torch and
Triton alone: Gluon's names are in kernels/runtime/_gluon.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._opaque_base import OpaqueBaseMeta
from torch.fx import Node

if TYPE_CHECKING:
    from torch._library.opaque_object import MemberType

T = TypeVar("T", bound=type)

# torch 2.11 accepts an opaque class only with this metaclass; later releases do not mind it.
OpaqueMeta = OpaqueBaseMeta


def torch_version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_newer_than(release: tuple[int, int]) -> bool:
    """Whether the running torch is of a later release."""
    return torch_version() > release


# Dynamo's own functions of DTensors; up to torch 2.11 they are called prim_to_local, "prim from_local" and prim_redistribute.
SAME_SHARDS = {"from_local", "prim from_local", "to_local", "prim_to_local"}
REDISTRIBUTE = {"redistribute", "prim_redistribute"}


def source_name(source: Any) -> str:
    """A source of Dynamo's as it spells it ("L['x']"): a method up to torch 2.11, a property after."""
    name: str = source.name() if callable(source.name) else source.name
    return name


def attribute_read(node: Node) -> str:
    """ "mT" of a node x.mT, "" of other nodes: Dynamo spells it as getattr, T and mT from torch 2.14 on as operations of their own."""
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1])
    return {torch.ops.aten.mT: "mT", torch.ops.aten.numpy_T: "T"}.get(node.target, "")  # type: ignore[call-overload,no-any-return]


def is_exporting() -> bool:
    """Whether torch.export traces, as code that Dynamo reads may ask: to it torch 2.11 answers torch.compiler.is_exporting() with True always."""
    return torch.compiler._is_exporting_flag


def mutation_analysis_name() -> str:
    """The function of torch's triton_kernel_wrap that finds what a kernel writes."""
    return "identify_mutated_tensors" if torch_version() == (2, 11) else "identify_accessed_tensors"


def as_analysed(written: list[str], updated: tuple[str, ...], arguments: Mapping[str, Any]) -> Any:
    """That function's result for a launch which writes some of its tensors, reads some of those, and the others alone."""
    if torch_version() == (2, 11):
        return written
    from torch._higher_order_ops.triton_kernel_wrap import TensorAccesses
    from torch._inductor.dependencies import Dep, ReadWrites, StarDep
    from torch._inductor.ir import TensorBox
    from torch.utils._ordered_set import OrderedSet

    def dependences(names: Iterable[str]) -> OrderedSet[Dep]:
        return OrderedSet(StarDep(name) for name in names)

    tensors = [name for name, value in arguments.items() if isinstance(value, (torch.Tensor, TensorBox))]
    read = [name for name in tensors if name not in written or name in updated]
    accesses = ReadWrites(reads=dependences(read), writes=dependences(written), index_exprs=OrderedSet())
    return TensorAccesses(accesses, can_fuse_epilogue=False)


def asks_for_inference(custom_pass: object) -> bool:
    """Whether a user's Inductor pass takes `is_inference` too; torch 2.11 has no such passes."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    return aware is not None and isinstance(custom_pass, aware)


def nodes_of_updater(updater: Any) -> Iterable[Node]:
    """The nodes of the graph that torch's FakeTensorUpdater keeps. Torch 2.11 gives it the graph, torch 2.13 the graph's module."""
    graph = updater.gm.graph if hasattr(updater, "gm") else getattr(updater, "graph", None)
    return () if graph is None else graph.nodes


def sm_carveout() -> int:
    """The multiprocessors that torch's own scaled products leave to other kernels; 0 in a release that has no such setting."""
    read = getattr(torch._C, "_get_sm_carveout_experimental", None)
    return (read() if read is not None else None) or 0


def register_value_class(cls: T) -> T:
    """Registers a frozen class as a value that graphs carry as a constant and that guards compare by equality."""
    from torch._library import opaque_object

    name = f"{cls.__module__}.{cls.__qualname__}"
    if torch._C._is_opaque_type_registered(
        name
    ):  # a class that is defined again, as in a notebook; every release refuses it
        torch._C._unregister_opaque_type(name)  # type: ignore[attr-defined]
    if hasattr(opaque_object, "register_custom_class"):  # torch 2.15 renamed it
        opaque_object.register_custom_class(cls, typ="constant")
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=_members(cls))
    return cls


def _members(cls: type) -> dict[str, MemberType] | None:
    """How torch 2.11 may touch a value while tracing: fields are read, methods traced. Later releases find out themselves."""
    from torch._library.opaque_object import MemberType

    if torch_version() > (2, 11):
        return None
    members = {}
    for base in cls.__mro__:
        members.update(dict.fromkeys(inspect.get_annotations(base), MemberType.USE_REAL))
        for name, member in vars(base).items():
            if callable(member) and not name.startswith("__"):
                members[name] = MemberType.INLINED
    return members

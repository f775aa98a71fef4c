"""The FLOPs of a model's matrix products as torch's own counter has them: what the rows of `explain` must add up to.

The model's forward runs once more, eagerly, on fake tensors where it can. So code that Dynamo does not compile counts too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from te_dynamo.inspect.target import exchange_tensors, held_as_before, tensors_in
from te_dynamo.report import MatchRecord
from te_dynamo.user_code import without_wrappers


@dataclasses.dataclass
class MatrixFlops:
    """FLOPs of the products of one forward.

    by_weight:   those with an operand that is made of parameters alone, by the path of the module that ran them.
    activations: those of two tensors that depend on the model's input, such as attention's.
    """

    by_weight: Counter[str] = dataclasses.field(default_factory=Counter)
    activations: int = 0

    @property
    def total(self) -> int:
        return self.by_weight.total() + self.activations


def count_matrix_flops(target: Callable[..., Any], args: Any, kwargs: Any) -> MatrixFlops:
    """Of one forward of `target`, on fake tensors; on the real ones where these do not do, since data decides what runs."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(
        False
    )  # nn.TransformerEncoderLayer as one call, which the counter has no formula for
    try:
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            fakes = FakeTensorMode(allow_non_fake_inputs=True)
            with contextlib.suppress(Exception), held_as_before(target), fakes:
                for module in target.modules() if isinstance(target, nn.Module) else ():
                    exchange_tensors(module, fakes.from_tensor)  # a forward may set the data of its own
                return _count(target, *_copied((args, kwargs)))
        with held_as_before(target):
            return _count(target, args, kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.clear_autocast_cache()


def _copied(tree: Any) -> Any:
    """A copy of all but the tensors: what the call puts into a cache that it was given stays out of the user's."""
    return copy.deepcopy(tree, {id(leaf): leaf for leaf in tensors_in(tree)})


def share_with_rows(found: MatrixFlops, rows: Sequence[MatchRecord]) -> float:
    """Which share of the FLOPs is a row's, or of a product of activations, 0 to 1. A row without a size, since data decides it, stands
    for what its module did."""
    unknown = {row.owner for row in rows if not row.flops}
    counted = sum(row.flops for row in rows) + sum(found.by_weight[module] for module in unknown)
    return (min(counted, found.by_weight.total()) + found.activations) / found.total if found.total else 1.0


def _count(target: Callable[..., Any], args: Any, kwargs: Any) -> MatrixFlops:
    found, made = MatrixFlops(), _MadeOf(target)
    mapping = {op: _noted(formula, made, found) for op, formula in {**flop_registry, **_MORE}.items()}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    # Not compiled, what the model compiles of itself too: Dynamo would run that eagerly ever after a call in such a mode.
    with torch.compiler.set_stance("force_eager"), made.follows_calls(), made, counter:
        target(*args, **kwargs)
    return found


def _noted(formula: Callable[..., int], made: _MadeOf, found: MatrixFlops) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        flops = int(formula(*args, **kwargs, out_val=out_val))
        if any(made.is_weight(operand) for operand in tensors_in(args) if operand.dim() > 1):
            found.by_weight[made.module()] += flops
        else:
            found.activations += flops
        return flops

    count._get_raw = True  # type: ignore[attr-defined]
    return count


class _MadeOf(TorchDispatchMode):
    """Follows which tensors are made of parameters alone, or of constants; all others depend on the model's input. And which modules run."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        self._paths: dict[nn.Module, str] = {}
        if isinstance(target, nn.Module):
            self._know(target)
        self._running: list[nn.Module] = []
        self._from_parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        if isinstance(target, nn.Module):
            self._from_parameters.update({buffer: False for buffer in target.buffers()})
            self._from_parameters.update(
                {part: True for parameter in target.parameters() for part in _parts(parameter)}
            )

    def is_weight(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or bool(self._from_parameters.get(tensor))

    def _know(self, root: nn.Module) -> None:
        self._paths = {module: path for path, module in root.named_modules()} | self._paths

    @contextlib.contextmanager
    def follows_calls(self) -> Iterator[None]:
        """Inside, `module` knows which modules run."""

        def begin(module: nn.Module, _: Any) -> None:
            if module not in self._paths:  # of a function
                self._know(module)
            self._running.append(module)

        def end(*_: Any) -> None:
            self._running.pop()

        with register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True):
            yield

    def module(self) -> str:
        """The path of the innermost module whose forward runs."""
        return without_wrappers(self._paths[self._running[-1]] if self._running else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = tensors_in((args, kwargs))
        if all(isinstance(o, nn.Parameter) or o in self._from_parameters for o in operands):
            from_parameters = any(map(self.is_weight, operands))
            for leaf in tensors_in(result):
                if leaf not in self._from_parameters:
                    self._from_parameters[leaf] = from_parameters
        return result


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """It, and the tensors of which a subclass is made: torchao's weights dequantize to what is made of these."""
    yield tensor
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))


def _grouped_mm(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Tokens by experts, [M, K] by [G, K, N]; [G, m, K] by [G, K, N]."""
    return 2 * x.numel() * weight.shape[-1]


def _recurrent(x: Tensor, *args: Any, **kwargs: Any) -> int:
    """Each matrix of a layer multiplies every step of every sequence."""
    matrices = [leaf for leaf in tree_leaves(args) if isinstance(leaf, nn.Parameter) and leaf.dim() == 2]
    return 2 * (x.numel() // x.shape[-1]) * sum(matrix.numel() for matrix in matrices)


_aten = torch.ops.aten
_MORE: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._grouped_mm: _grouped_mm,
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten._cudnn_rnn: _recurrent,
}
"""What torch's counter has no formula for."""

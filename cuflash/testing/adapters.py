"""Other implementations behind the signatures of ours, so that the kit can be held to them.

An adapter is a short function with the signature of ``cuflash.flash_attention`` or of
``cuflash.softmax`` on NumPy arrays, as far as the other library goes: its keyword parameters say
which options are supported. What cannot be asked raises NotImplementedError. A library is imported
when it is called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import cuflash
from cuflash.problem_vjp import AttentionGrads
from cuflash.testing import properties, softmax_properties
from cuflash.testing.problems import Array, AttentionCase, Shape, SoftmaxCase
from cuflash.testing.properties import ATTENTION_PROPERTIES
from cuflash.testing.softmax_properties import SOFTMAX_NAMES, SOFTMAX_PROPERTIES, SoftmaxProperty

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: Keyword arguments without which a property has nothing to ask.
_NEEDED: dict[Callable[..., None], set[str]] = {
    properties.split_of_keys: {"query_offset", "return_lse"},
    properties.grouped_heads_equal_repeated_heads: {"enable_gqa"},
    properties.shift_invariance: {"bias"},
    properties.causal_future_independence: {"causal"},
    properties.poisoned_outputs_fully_written: {"out", "lse"},
    properties.unrounded_output: {"out", "lse"},
    softmax_properties.where_hides: {"where"},
    softmax_properties.output_fully_written: {"out"},
    softmax_properties.in_place: {"out"},
}
#: Properties of probabilities.
_NOT_OF_LOGSUMEXP = ("rows_sum_to_one", "in_place")


def _as_drawn(case: Any) -> Any:
    return case


@dataclass(frozen=True)
class Adapter:
    """An implementation, and what can be asked of it.

    It is called as ``cuflash.flash_attention`` or ``cuflash.softmax``. An option that the
    implementation does not accept raises NotImplementedError, unless it is at its default.

    Parameters
    ----------
    function
        What it computes: "attention", "softmax", "log_softmax" or "logsumexp".
    call
        The implementation. Attention without a parameter `return_lse` has no lse: it is None.
    accepts
        Names of the keyword arguments of `call`.
    draws
        Keyword arguments of the strategy, such as dtypes and layouts.
    fit
        Turns a drawn case into one that the implementation can be asked.
    library
        What must be installed.
    """

    function: str
    call: Callable[..., Any]
    accepts: frozenset[str]
    draws: Mapping[str, Any] = field(default_factory=dict)
    fit: Callable[[Any], Any] = _as_drawn
    library: str = "numpy"

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Call the implementation."""
        with_lse = options.get("return_lse", False)
        for name in options.keys() - self.accepts - {"return_lse"}:
            value = options.pop(name)
            if value is not None and value is not False and not (name == "axis" and value == -1):
                raise NotImplementedError(f"the option {name} is not supported")
        if with_lse and "return_lse" not in self.accepts:
            del options["return_lse"]
            return self.call(*operands, **options), None
        return self.call(*operands, **options)

    def problems(self) -> SearchStrategy[Any]:
        """Return the strategy that draws its cases; it needs hypothesis."""
        from cuflash.testing import strategies

        if self.function != "attention":
            drawn = strategies.softmax_problems(**self.draws)
            return drawn.map(self._without_options).map(self.fit)
        options = [name for name in strategies.OPTIONS if name in self.accepts]
        return strategies.attention_problems(options=options, **self.draws).map(self.fit)

    def _without_options(self, case: SoftmaxCase) -> SoftmaxCase:
        defaults: dict[str, Any] = {"axis": -1, "where": None}
        return replace(case, **{n: x for n, x in defaults.items() if n not in self.accepts})

    def properties(self) -> dict[str, Callable[[Any], None]]:
        """Return the properties that have something to ask, by name; each takes a case."""
        if self.function == "attention":
            return {
                name: partial(law, self)
                for name, law in ATTENTION_PROPERTIES.items()
                if _NEEDED.get(law, set()) <= self.accepts
            }

        def bound(law: SoftmaxProperty) -> Callable[[Any], None]:
            return lambda case: law(self, case, self.function)

        return {
            name: bound(law)
            for name, law in SOFTMAX_PROPERTIES.items()
            if _NEEDED.get(law, set()) <= self.accepts
            and not (self.function == "logsumexp" and name in _NOT_OF_LOGSUMEXP)
        }


def adapt(call: Callable[..., Any], name: str = "", **fields: Any) -> Adapter:
    """Make an adapter of a callable by its signature.

    Three operands make it attention, one makes it softmax, or log_softmax or logsumexp if its name
    says so. Its options are its keyword parameters; one of ``**options`` accepts all.

    Parameters
    ----------
    call
        Takes and returns NumPy arrays.
    name
        What it is called, by default its ``__name__``.
    **fields
        Further fields of the adapter.

    Returns
    -------
    Adapter
        The adapter.

    Raises
    ------
    ValueError
        If the signature cannot be read or has neither one nor three operands.
    """
    name = name or getattr(call, "__name__", "")
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError as error:
        raise ValueError(f"{name} has no signature: give an Adapter of it") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    if len(required) not in (1, 3):
        raise ValueError(
            f"{name} takes {len(required)} operands; attention takes q, k and v, softmax takes x"
        )
    named = next((n for n in reversed(SOFTMAX_NAMES) if n in name), "softmax")
    function = "attention" if len(required) == 3 else named
    accepts = {p.name for p in parameters if p not in required}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        ours = cuflash.flash_attention if function == "attention" else cuflash.softmax
        accepts |= inspect.signature(ours).parameters.keys()
    return Adapter(function, call, frozenset(accepts), **fields)


# --------------------------------------------------------------------- attention elsewhere


def _one_batch(case: AttentionCase, axes: int | None = None) -> AttentionCase:
    """Give q, k and v one batch shape, of `axes` axes if that is given, and v the width of k."""
    heads = case.batch_shape[-1:]
    rest = (1,) * ((axes or 0) - len(case.batch_shape)) + case.batch_shape[:-1]
    if axes and not heads:
        rest, heads = rest[1:], (1,)
    key_heads = case.k_batch[-1:] if case.enable_gqa else heads
    return replace(
        case,
        q_batch=(*rest, *heads),
        k_batch=(*rest, *key_heads),
        v_batch=(*rest, *key_heads),
        dv=case.d,
        query_offset=0 if case.causal or case.window else None,
    )


def _first_query_at_first_key(q: Array, k: Array, lengths: Any, offset: Any) -> None:
    default = (k.shape[-2] if lengths is None else lengths) - q.shape[-2]
    if np.any(default if offset is None else offset):
        raise NotImplementedError("the first query stands at the first key")


def jax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    key_lengths: Any = None,
    mask: Array | None = None,
    bias: Array | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """Call ``jax.nn.dot_product_attention``, whose axes are (B, T, N, H).

    Its lse is rounded to the dtype of k: for 16-bit ones it is None here.
    """
    import jax

    if causal or window is not None:
        _first_query_at_first_key(q, k, key_lengths, query_offset)
    if not enable_gqa and q.shape[-3] != k.shape[-3]:
        raise NotImplementedError("q, k and v have one batch shape")
    options: dict[str, Any] = {"scale": scale, "is_causal": causal, "mask": mask, "bias": bias}
    if window is not None:
        sides = (max(q.shape[-2], k.shape[-2]) if side is None else side for side in window)
        options["local_window_size"] = tuple(sides)
    if key_lengths is not None:
        if np.shape(key_lengths)[-1:] not in ((), (1,)):
            raise NotImplementedError("key_lengths are those of a batch entry, not of a head")
        lengths = np.broadcast_to(key_lengths, (q.shape[0], 1))[:, 0]
        options["key_value_seq_lengths"] = lengths.astype(np.int32)
    by_token = (x.swapaxes(-2, -3) for x in (q, k, v))
    result, residual = jax.nn.dot_product_attention(*by_token, **options, return_residual=True)
    out = np.asarray(result).swapaxes(-2, -3)
    lse = np.asarray(residual).swapaxes(-1, -2) if q.dtype.itemsize > 2 else None
    return (out, lse) if return_lse else out


def _sent(x: Any) -> Any:
    """Return NumPy's arrays as JAX's, anything else as it is."""
    import jax

    if not isinstance(x, np.ndarray | np.inexact | np.bool):
        return x
    return jax.numpy.asarray(x.astype(x.dtype.newbyteorder("=")))


def _in_jax(call: str, *operands: Any, **options: Any) -> Any:
    """Call a function of `cuflash.jax` with NumPy arrays, and with float64."""
    import jax

    from cuflash import jax as functions

    with jax.enable_x64(True):
        named = {name: _sent(x) for name, x in options.items()}
        results = getattr(functions, call)(*map(_sent, operands), **named)
        return jax.tree.map(np.array, results)


def _cuflash_jax_softmax(function: str) -> Callable[..., Any]:
    def call(x: Array, axis: int | Shape | None = -1, where: Array | None = None) -> Any:
        return _in_jax(function, x, axis, where=where)

    return call


def cuflash_jax_vjp(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Array | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Any:
    """Pull back through `cuflash.jax.flash_attention`, with the out and lse that it has made.

    Takes and returns what `cuflash.flash_attention_vjp` does; dout is rounded to q's dtype.
    """
    import jax

    from cuflash.jax import flash_attention

    with jax.enable_x64(True):
        options = {name: _sent(x) for name, x in options.items()}
        operands = dict(zip("qkv", map(_sent, (q, k, v)), strict=True))
        operands |= {name: options.pop(name) for name in ("bias", "sinks") if name in options}

        def attend(operands: dict[str, Any]) -> Any:
            return flash_attention(
                **operands, **options, return_lse=dlse is not None, deterministic=deterministic
            )

        _, pull_back = jax.vjp(attend, operands)
        cotangents = _sent(dout).astype(operands["q"].dtype)
        (grads,) = pull_back(cotangents if dlse is None else (cotangents, _sent(dlse)))
        return AttentionGrads(**{f"d{name}": np.array(x) for name, x in grads.items()})


def _tensor(x: Array) -> Any:
    """Return a tensor that shares memory; PyTorch's NumPy bridge does not know bfloat16."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def torch_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    query_offset: Any = None,
    mask: Array | None = None,
    bias: Array | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Call ``torch.nn.functional.scaled_dot_product_attention``, which has one mask or bias."""
    import torch

    if causal:
        _first_query_at_first_key(q, k, None, query_offset)
    given = [x for x in (mask, bias) if x is not None]
    if len(given) + causal > 1:
        raise NotImplementedError("one of causal, mask and bias can be given")
    out = torch.nn.functional.scaled_dot_product_attention(
        *map(_tensor, (q, k, v)),
        attn_mask=_tensor(np.atleast_2d(given[0])) if given else None,
        is_causal=causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return _array(out, q.dtype)


def _array(x: Any, dtype: np.dtype[Any]) -> Array:
    """Return a tensor's memory as an array."""
    import torch

    if x.dtype == torch.bfloat16:
        return np.asarray(x.view(torch.int16).numpy().view(dtype))
    return np.asarray(x.numpy())


def _torch_case(case: AttentionCase) -> AttentionCase:
    return replace(_one_batch(case), bias_dtype=case.dtype)


# ----------------------------------------------------------------------- softmax elsewhere


def _scipy(function: str) -> Callable[..., Any]:
    def call(x: Array, axis: int | Shape | None = -1) -> Any:
        from scipy import special

        return getattr(special, function)(x, axis=axis)

    return call


def _cupyx(function: str) -> Callable[..., Any]:
    def call(x: Array, axis: int | Shape | None = -1) -> Any:
        import cupy
        from cupyx.scipy import special

        return cupy.asnumpy(getattr(special, function)(cupy.asarray(x), axis=axis))

    return call


def _torch_softmax(function: str) -> Callable[..., Any]:
    def call(x: Array, axis: int | Shape | None = -1) -> Any:
        import torch

        if axis is None or (isinstance(axis, tuple) and function != "logsumexp"):
            raise NotImplementedError("softmax is over one axis")
        return _array(getattr(torch, function)(_tensor(x), dim=axis), x.dtype)

    return call


def _family(
    make: Callable[[str], Callable[..., Any]], library: str, **draws: Sequence[Any]
) -> dict[str, Adapter]:
    return {name: adapt(make(name), name, library=library, draws=draws) for name in SOFTMAX_NAMES}


#: A tile of the NumPy engine is 256 queries by 512 keys: some problems have several.
_HOST_TILES = {"borders": (512, 1024), "max_tokens": 1100, "max_features": 8}
#: Layouts that PyTorch can be given without a copy.
_TORCH_LAYOUTS = ("contiguous", "fortran", "tokens_first", "step", "packed", "offset")
_NUMPY_DTYPES = ("float64", "float32", "float16")

#: Adapters by target and function. What is in `draws` is what the library takes.
ADAPTERS: dict[str, dict[str, Adapter]] = {
    "cuflash-host": {
        "attention": adapt(cuflash.flash_attention, draws=_HOST_TILES),
        **{name: adapt(getattr(cuflash, name)) for name in SOFTMAX_NAMES},
    },
    "cuflash-jax": {
        "attention": Adapter(
            "attention",
            partial(_in_jax, "flash_attention"),
            frozenset(inspect.signature(cuflash.flash_attention).parameters)
            - {"q", "k", "v", "out", "lse", "workspace"},
            library="jax",
            # JAX copies its inputs: layouts are not seen.
            draws={"layouts": ("contiguous",), "max_tokens": 40, "max_features": 20},
        ),
        **_family(_cuflash_jax_softmax, "jax", layouts=("contiguous",)),
    },
    "jax": {
        "attention": adapt(
            jax_attention,
            library="jax",
            fit=partial(_one_batch, axes=2),
            # float64 is an option of JAX that is off. JAX copies its inputs: layouts are not seen.
            draws={
                "dtypes": ("float32", "float16", "bfloat16"),
                "layouts": ("contiguous",),
                "max_batch_axes": 2,
                "max_tokens": 40,
                "max_features": 20,
            },
        )
    },
    "torch": {
        "attention": adapt(
            torch_attention, library="torch", fit=_torch_case, draws={"layouts": _TORCH_LAYOUTS}
        ),
        **_family(_torch_softmax, "torch", layouts=_TORCH_LAYOUTS),
    },
    "scipy": _family(_scipy, "scipy", dtypes=_NUMPY_DTYPES),
    "cupyx": _family(_cupyx, "cupyx", dtypes=_NUMPY_DTYPES),
}


def find(target: str) -> dict[str, Adapter]:
    """Return the adapters of a target, by function.

    Parameters
    ----------
    target
        A key of `ADAPTERS`, or ``package.module:name`` of a callable or an :class:`Adapter`; the
        current directory is searched first.

    Returns
    -------
    dict of str to Adapter
        At least one.

    Raises
    ------
    ValueError
        If there is no such target, or its library is not installed or has no GPU that it needs.
    """
    adapters = ADAPTERS.get(target)
    if adapters is None:
        adapter = _imported(target)
        adapters = {adapter.function: adapter}
    for adapter in adapters.values():
        if find_spec(adapter.library) is None:
            raise ValueError(f"{target} needs {adapter.library}, which is not installed")
    if target == "cupyx" and not _has_gpu():
        raise ValueError("cupyx needs a GPU, and CuPy finds none")
    return adapters


def _has_gpu() -> bool:
    import cupy

    return bool(cupy.is_available())


def _imported(target: str) -> Adapter:
    module_name, colon, name = target.partition(":")
    if not (module_name and colon and name):
        raise ValueError(
            f"there is no target {target}; give {', '.join(ADAPTERS)} or package.module:callable"
        )
    sys.path.insert(0, "")
    try:
        found = import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {target}: {error}") from error
    except (Exception, SystemExit) as error:  # of the module's own code
        raise ValueError(f"cannot import {target}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove("")
    if isinstance(found, Adapter):
        return found
    if not callable(found):
        raise ValueError(f"{target} is not callable")
    return adapt(found, name)

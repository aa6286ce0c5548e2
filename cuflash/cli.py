"""The command line: ``cuflash demo``, ``info``, ``attend``, ``softmax``, ``bench`` and so on.

Exit codes: 0 done; 1 something that `fuzz` asks for does not hold; 2 wrong arguments, files or
shapes, told in one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuflash

from . import _bench, _plots
from ._files import read_npy, read_npz, replacing
from ._runners import DeviceRunner, HostRunner, Runner
from .host.threads import worker_count
from .problem import ArraySpec, AttentionArrays, AttentionProblem, c_strides

_DTYPES = ("float64", "float32", "float16", "bfloat16")
_INTEGERS = ("query_lengths", "key_lengths", "query_offset")
#: What IN.npz of `cuflash attend` may hold besides q, k and v.
_ARRAY_OPTIONS = ("mask", "bias", *_INTEGERS, "alibi_slopes", "sinks")

#: Options of `info` that only attention has.
_OF_ATTENTION = (
    *("causal", "enable_gqa", "scale", "window", "softcap", "options", "strides", "num_splits"),
)
_ATTEND_HELP = """\
IN.npz holds the arrays q (..., Tq, D), k (..., Tk, D) and v (..., Tk, Dv), and if wanted mask,
bias, query_lengths, key_lengths, query_offset, alibi_slopes and sinks, as flash_attention takes
them. OUT.npz gets out (..., Tq, Dv) and lse (..., Tq).

NumPy's files know no bfloat16: numpy.savez writes such an array as two-byte void, dtype V2. That
is read here as bfloat16, and a bfloat16 result is written the same way, to be read by
numpy.load("OUT.npz")["out"].view(ml_dtypes.bfloat16)."""

_TARGET_HELP = "cuflash-host, cuflash-jax, jax, torch, scipy, cupyx or package.module:callable"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"cuflash: error: {message} (see {self.prog} --help)\n")


def engine_at_hand(engine: str) -> str:
    """Return "host" or "device" for the value of ``--engine``; ValueError if it is not there."""
    obstacle = None if engine == "host" else _device_obstacle()
    if engine == "device" and obstacle:
        raise ValueError(f"--engine device: {obstacle}")
    return "host" if engine == "host" or obstacle else "device"


def _runner(engine: str) -> Runner:
    return HostRunner() if engine_at_hand(engine) == "host" else DeviceRunner(_cupy())


def _device_obstacle() -> str | None:
    """Tell why the CuPy engine cannot run here; None if it can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'cuflash[cuda13]', or cuda12)"
    if importlib.util.find_spec("cuflash.device") is None:
        return "this version of cuflash has no CuPy engine"
    runtime = _cupy().cuda.runtime
    try:
        runtime.getDeviceCount()  # raises if there is none
    except runtime.CUDARuntimeError as error:
        return str(error)
    return None


def _demo(args: argparse.Namespace) -> None:
    from . import _demo as demo

    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib (pip install 'cuflash[plot]')")
    runner = _runner(args.engine)
    layer = demo.Layer.read(args.file)
    layer.heads(args.head)  # refuses a head that is not there before anything is printed
    if args.plot:
        with replacing(args.plot) as file:
            demo.attention_map(layer, runner, args.head).savefig(file, format="png")
    for line in demo.report(layer, runner, head=args.head, keys=args.keys, repeats=args.repeats):
        print(line, flush=True)


def _info(args: argparse.Namespace) -> None:
    if args.softmax:
        _refuse_options_of_attention(args)
        _info_softmax(args)
        return
    if args.attention:
        _info_attention(args)
        return
    if args.device_like:
        raise ValueError("--device-like goes with --softmax and --attention")
    _refuse_options_of_attention(args)
    if args.measure:
        _info_measured()
        return
    obstacle = _device_obstacle()
    lines = [
        ("cuflash", cuflash.__version__),
        ("engines", f"host; no device: {obstacle}" if obstacle else "host, device"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("CPUs", str(worker_count())),
        ("NumPy", np.__version__),
        ("BLAS", _found(_blas)),
        ("ml_dtypes", ml_dtypes.__version__),
        ("CuPy", _found(lambda: _cupy().__version__)),
        ("NVRTC", _found(lambda: "{}.{}".format(*_cupy().cuda.nvrtc.getVersion()))),
        ("CUDA driver", _found(_driver)),
        ("GPUs", _found(_gpus)),
    ]
    for name, value in lines:
        print(f"{name:13}{value}")


def _refuse_options_of_attention(args: argparse.Namespace) -> None:
    for name in _OF_ATTENTION:
        given = getattr(args, name)
        if given not in (None, ()) and given is not False:
            raise ValueError(f"--{name.replace('_', '-')} goes with --attention")


def _info_measured() -> None:
    from .bench import machine, quick, rows

    engine = engine_at_hand("auto")
    there = _bench.machine_of(engine)
    found = quick.ceiling_rows(machine.measure(there, told=lambda name: None))
    print(f"what {there.environment()['machine']} reaches, by the {engine} engine")
    print(rows.table(found))


def _info_softmax(args: argparse.Namespace) -> None:
    name, limits, occupancy = _device_limits(args, "--softmax")
    dtype = np.dtype(args.dtype)
    print(f"softmax of contiguous {dtype.name} rows on {name}, method auto")
    for line in occupancy.report(limits, dtype):
        print(line)
    print("\na float32 row in the shared memory of a block of 256 threads, without opt-in")
    for line in occupancy.source_report(limits):
        print(line)


def _device_limits(args: argparse.Namespace, option: str) -> tuple[str, Any, Any]:
    """Return the name and limits of the GPU that is asked about, and what knows about GPUs."""
    obstacle = _device_obstacle()
    if importlib.util.find_spec("cupy") is None or (obstacle and not args.device_like):
        raise ValueError(f"info {option}: {obstacle}")
    occupancy = importlib.import_module("cuflash.device.occupancy")
    if not args.device_like:
        return "this GPU", occupancy.device_limits(_cupy().cuda.runtime.getDevice()), occupancy
    if args.device_like not in occupancy.KNOWN_GPUS:
        known = ", ".join(occupancy.KNOWN_GPUS)
        raise ValueError(f"--device-like {args.device_like}: not one of {known}")
    return args.device_like, occupancy.KNOWN_GPUS[args.device_like], occupancy


def _info_attention(args: argparse.Namespace) -> None:
    name, limits, _ = _device_limits(args, "--attention")
    if len(args.attention) > 3:
        raise ValueError(f"--attention: {len(args.attention)} shapes, but q, k and v are three")
    q, *rest = args.attention
    k = rest[0] if rest else q
    v = rest[1] if len(rest) > 1 else (*k[:-1], q[-1])
    dtype = np.dtype(args.dtype)
    specs = [ArraySpec(x, c_strides(x, dtype.itemsize), dtype) for x in (q, k, v)]
    if args.strides:
        if [len(x) for x in args.strides] != [len(x.shape) for x in specs]:
            raise ValueError("--strides: as many lists as arrays, as many steps as axes")
        specs = [
            spec._replace(strides=tuple(step * dtype.itemsize for step in steps))
            for spec, steps in zip(specs, args.strides, strict=True)
        ]
    scores, slopes = (*q[-2:-1], *k[-2:-1]), q[-3:-2]
    options = {
        "mask": ArraySpec(scores, c_strides(scores, 1), np.dtype(np.bool)),
        "bias": ArraySpec(scores, c_strides(scores, 4), np.dtype(np.float32)),
        "alibi_slopes": ArraySpec(slopes, c_strides(slopes, 4), np.dtype(np.float32)),
    }
    given = {name: options[name] for name in args.options}
    problem = AttentionProblem.of(
        AttentionArrays(*specs, **given), enable_gqa=args.enable_gqa, scale=args.scale,
        causal=args.causal, window=args.window, softcap=args.softcap, num_splits=args.num_splits,
        method="auto",
    )  # fmt: skip
    layout = "strided" if args.strides else "contiguous"
    attention_report = importlib.import_module("cuflash.device.attention_report")
    try:
        lines = list(attention_report.report(problem, limits))
    except OverflowError as error:
        raise ValueError(f"--attention, --strides: beyond 64 bits: {error}") from error
    print(f"attention of {layout} {dtype.name} q {q}, k {k}, v {v} on {name}, method auto")
    for line in lines:
        print(line)


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = (-1,)
    if min(shape) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 2,16,4096,128")
    return shape


def _steps(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _found(probe: Callable[[], str]) -> str:
    """Return what `probe` finds, or why it finds nothing: information is no reason to fail."""
    try:
        return probe()
    except Exception as error:
        return f"not available: {_one_line(error)}"


def _cupy() -> Any:
    return importlib.import_module("cupy")


def _blas() -> str:
    from threadpoolctl import threadpool_info

    libraries = [entry for entry in threadpool_info() if entry["user_api"] == "blas"]
    return "; ".join(
        f"{entry['internal_api']} {entry['version']}, {entry['num_threads']} threads"
        for entry in libraries
    )


def _driver() -> str:
    version = _cupy().cuda.runtime.driverGetVersion()
    if version == 0:
        raise RuntimeError("no driver")
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


def _gpus() -> str:
    runtime = _cupy().cuda.runtime
    gpus = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    return "; ".join(
        f"{gpu['name'].decode()}, compute capability {gpu['major']}.{gpu['minor']}, "
        f"{gpu['totalGlobalMem'] / 2**30:.0f} GiB"
        for gpu in gpus
    )


def _attend(args: argparse.Namespace) -> None:
    arrays = read_npz(args.input)
    missing = [name for name in ("q", "k", "v") if name not in arrays]
    if missing:
        raise ValueError(f"{args.input} has no array {', '.join(missing)}")
    unknown = sorted(arrays.keys() - {"q", "k", "v", *_ARRAY_OPTIONS})
    if unknown:
        raise ValueError(
            f"{args.input} has an array {', '.join(unknown)}; besides q, k and v there may be "
            f"{', '.join(_ARRAY_OPTIONS)}"
        )
    if args.query_offset is not None and "query_offset" in arrays:
        raise ValueError(f"query_offset is given by {args.input} and by --query-offset")

    runner = _runner(args.engine)
    options = {
        name: x.item() if x.ndim == 0 and name in _INTEGERS else runner.asarray(x)
        for name, x in arrays.items()
        if name in _ARRAY_OPTIONS
    }
    options |= {
        "scale": args.scale,
        "causal": args.causal,
        "window": args.window,
        "softcap": args.softcap,
        "enable_gqa": args.enable_gqa,
        "num_splits": args.num_splits,
        "method": args.method,
    }
    if args.query_offset is not None:
        options["query_offset"] = args.query_offset
    q, k, v = (runner.asarray(_cast(name, arrays[name], args.dtype)) for name in ("q", "k", "v"))
    with replacing(args.output) as file:
        out, lse = cuflash.flash_attention(q, k, v, return_lse=True, **options)
        np.savez(file, out=runner.asnumpy(out), lse=runner.asnumpy(lse))


def _softmax(args: argparse.Namespace) -> None:
    runner = _runner(args.engine)
    x = runner.asarray(_cast("x", read_npy(args.input), args.dtype))
    function = cuflash.log_softmax if args.log else cuflash.softmax
    with replacing(args.output) as file:
        np.save(file, runner.asnumpy(function(x, axis=args.axis, method=args.method)))


def _fuzz(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("hypothesis") is None:
        raise ValueError("fuzz needs hypothesis (pip install 'cuflash[testing]')")
    from . import _fuzz as fuzz

    holds = fuzz.run(
        args.target,
        examples=args.examples,
        seed=args.seed,
        names=args.property,
        file=args.json,
    )
    return 0 if holds else 1


def _cast(name: str, x: NDArray[Any], dtype: str | None) -> NDArray[Any]:
    """Convert real numbers; ValueError for others, or if a finite one would become infinite."""
    if dtype is None:
        return x
    if x.dtype.kind not in "biuf" and x.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"{name} has dtype {x.dtype}; --dtype converts real numbers only")
    with np.errstate(over="ignore"):
        converted = x.astype(dtype)  # ml_dtypes has given NumPy the name bfloat16
    if (np.isinf(converted) & np.isfinite(x)).any():
        raise ValueError(f"{name} holds numbers too large for --dtype {dtype}")
    return converted


def _head(text: str) -> int | None:
    return None if text == "mean" else int(text)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _side(text: str) -> int | None:
    return None if text == "none" else int(text)


def _axis(text: str) -> int | tuple[int, ...] | None:
    if text == "none":
        return None
    axes = tuple(map(int, text.split(",")))
    return axes[0] if len(axes) == 1 else axes


# argparse names the type in its message on a value that cannot be converted.
_head.__name__ = "head"
_positive.__name__ = "positive integer"
_side.__name__ = "window side"
_axis.__name__ = "axis"
_steps.__name__ = "list of integers"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cuflash", description="Exact softmax and attention.")
    parser.add_argument("--version", action="version", version=f"cuflash {cuflash.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    engine = _Parser(add_help=False)
    engine.add_argument(
        "--engine",
        choices=("auto", "host", "device"),
        default="auto",
        help="host is NumPy, device is CuPy; auto takes the device if there is one",
    )
    files = _Parser(add_help=False)
    files.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    files.add_argument(
        "--dtype", choices=_DTYPES, help="convert the input first (of attend, q, k, v)"
    )
    files.add_argument("--method", default="auto", help="as of the function (default: auto)")

    demo = commands.add_parser("demo", parents=[engine], help="attention over a real paragraph")
    demo.add_argument(
        "--head",
        type=_head,
        default=8,
        metavar="N|mean",
        help="whose strongest keys are listed (default: %(default)s, which looks one token ahead)",
    )
    demo.add_argument("--keys", type=_positive, default=3, help="how many (default: %(default)s)")
    demo.add_argument(
        "--repeats",
        type=_positive,
        default=10,
        help="measure the text this many times over, too (default: %(default)s)",
    )
    demo.add_argument(
        "--file", type=Path, help="another layer, written by examples/minilm.py --write-layer"
    )
    demo.add_argument("--plot", type=Path, metavar="PNG", help="write the attention map")
    demo.set_defaults(run=_demo)

    info = commands.add_parser(
        "info", help="engines, GPUs and versions; what is chosen for softmax and for attention"
    )
    asked = info.add_mutually_exclusive_group()
    asked.add_argument(
        "--softmax",
        action="store_true",
        help="which method for which row length, occupancy, predicted trips to memory",
    )
    asked.add_argument(
        "--attention",
        nargs="+",
        type=_shape,
        metavar="SHAPE",
        help="which kernel for q, k and v, such as 2,16,4096,128 (k and v like q), and why",
    )
    asked.add_argument(
        "--measure",
        action="store_true",
        help="the ceilings of the roofline, measured: a copy, products by dtype, a launch",
    )
    info.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the rows, or of q")
    info.add_argument(
        "--device-like", metavar="GPU", help="ask about a GPU that is not here: h200 or t4"
    )
    of_attention = info.add_argument_group("with --attention")
    of_attention.add_argument("--causal", action="store_true")
    of_attention.add_argument("--enable-gqa", action="store_true")
    of_attention.add_argument("--scale", type=float, help="default: 1 / sqrt(D)")
    of_attention.add_argument(
        "--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"), help="or none"
    )
    of_attention.add_argument("--softcap", type=float)
    of_attention.add_argument(
        "--options", nargs="+", default=(), choices=("mask", "bias", "alibi_slopes"),
        help="a mask or float32 bias of (Tq, Tk), slopes of the heads",
    )  # fmt: skip
    of_attention.add_argument(
        "--strides", nargs="+", type=_steps, metavar="STEPS",
        help="of q, k and v, in elements, such as 8388608,128,2048,1",
    )  # fmt: skip
    of_attention.add_argument("--num-splits", type=int)
    info.set_defaults(run=_info)

    attend = commands.add_parser(
        "attend",
        parents=[engine, files],
        help="flash_attention from file to file",
        description=_ATTEND_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    attend.add_argument("input", type=Path, metavar="IN.npz")
    attend.add_argument("--scale", type=float, help="default: 1 / sqrt(D)")
    attend.add_argument("--causal", action="store_true")
    attend.add_argument("--window", type=_side, nargs=2, metavar=("LEFT", "RIGHT"), help="or none")
    attend.add_argument("--query-offset", type=int, metavar="N")
    attend.add_argument("--softcap", type=float)
    attend.add_argument("--enable-gqa", action="store_true", help="q has G times as many heads")
    attend.add_argument("--num-splits", type=_positive, metavar="N")
    attend.set_defaults(run=_attend)

    softmax = commands.add_parser(
        "softmax", parents=[engine, files], help="softmax of an array from file to file"
    )
    softmax.add_argument("input", type=Path, metavar="IN.npy")
    softmax.add_argument(
        "--axis", type=_axis, default=-1, help="N, or N,M,... or none for all (default: -1)"
    )
    softmax.add_argument("--log", action="store_true", help="log_softmax")
    softmax.set_defaults(run=_softmax)

    _bench.add_command(commands, engine)
    _plots.add_command(commands)
    fuzz = commands.add_parser("fuzz", help="hold an attention or softmax to what must hold")
    fuzz.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    fuzz.add_argument(
        "--examples",
        type=_positive,
        default=1000,
        metavar="N",
        help="how many in all, dealt out to the properties (default: %(default)s)",
    )
    fuzz.add_argument("--seed", type=int, default=0, metavar="S", help="draws other examples")
    fuzz.add_argument(
        "--property", action="append", default=[], metavar="NAME", help="only this; may be repeated"
    )
    fuzz.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    fuzz.set_defaults(run=_fuzz)
    return parser


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments, by default those of the process.

    Returns
    -------
    int
        The exit code.
    """
    args = _parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # Our reader has enough, as in `cuflash demo | head`; the flush at exit must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (TypeError, ValueError, OSError, MemoryError) as error:
        print(f"cuflash: error: {_one_line(error)}", file=sys.stderr)
        return 2
    return code or 0

"""Small deliberate faults, and for each a test that catches it.

``make mutate`` plants them one by one in a copy of the tree, runs the test and prints the table of
what was caught: proof that these tests can fail, and for the right reason. It takes some minutes,
most of them to compile kernels. Its exit code is 1 if a fault survives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_NOT_COPIED = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.npz", "proposals")

HOST_ATTENTION, HOST_SCORE = "cuflash/host/attention.py", "cuflash/host/score.py"
HOST_VJP = "cuflash/host/attention_vjp.py"
HOST_SOFTMAX, HOST_ONLINE = "cuflash/host/softmax.py", "cuflash/host/online.py"
SIMT, SCORE = "kernels/attention/forward_simt.cu", "kernels/lib/score.cuh"
COMBINE, DECODE = "kernels/attention/combine.cu", "kernels/attention/decode_mma.cu"
PAIRS, BACKWARD = "kernels/attention/backward.cuh", "kernels/attention/backward_simt.cu"
MMA_STEPS = "kernels/attention/backward_mma.cuh"
ROWS, ONLINE = "kernels/softmax/rows.cuh", "kernels/softmax/online.cuh"
STATE = "kernels/lib/online_softmax.cuh"
HOST_FUSED, PHILOX = "cuflash/host/fused.py", "kernels/lib/philox.cuh"
NORM, NORM_ROWS = "kernels/fused/layer_norm.cu", "kernels/fused/rows.cuh"
NORM_VJP = "kernels/fused/layer_norm_backward.cu"
MATMUL_WIDE = "kernels/fused/matmul_wide.cu"
MATMUL_MMA, MATMUL_SIMT = "kernels/fused/matmul_mma.cu", "kernels/fused/matmul_simt.cu"
SCORES_MMA = "kernels/baselines/scores_mma.cu"

HOST_LAWS = "tests/host/test_attention_properties.py::test_small_tiles"
HOST_VJP_LAWS = "tests/host/test_attention_vjp_properties.py::test_small_tiles"
HOST_VJP_MEMORY = (
    "tests/host/test_attention_vjp.py::test_peak_memory_is_linear_in_the_number_of_tokens[1]"
)
HOST_CASE = "tests/host/test_cases.py::test_case"
HOST_LENGTHS = "tests/host/test_softmax.py::test_each_method_is_exact_at_every_length"
CUDA_VJP_TILES = "tests/host_cuda/test_attention_vjp.py::test_nothing_planted"
CUDA_VJP_MMA = "tests/host_cuda/test_attention_vjp_mma.py::test_nothing_planted"
CUDA_LAWS = "tests/host_cuda/test_attention.py::test_property"
CUDA_TILES = "tests/host_cuda/test_attention.py::test_nothing_planted"
CUDA_GROUPS = "tests/host_cuda/test_attention.py::test_groups_of_tiles"
CUDA_CASE = "tests/host_cuda/test_attention.py::test_case"
CUDA_DECODE = "tests/host_cuda/test_decode_mma.py::test_nothing_planted"
CUDA_SOFTMAX = "tests/host_cuda/test_softmax.py"
JAX_CALLS, JAX_OPS, JAX_HOST = "cuflash/jax/calls.py", "cuflash/jax/ops.py", "cuflash/jax/host.py"
JAX_DEVICE, JAX_ABI = "cuflash/jax/device.py", "cuflash/jax/ffi_abi.py"
JAX_ATTENTION, JAX_EMULATED = "tests/jax/test_attention.py", "tests/jax/test_device.py"
HOST_CHAINS, CUDA_CHAINS = "tests/host/test_fused.py", "tests/host_cuda/test_fused.py"


class Mutation(NamedTuple):
    """A fault: `old`, which is in `file` once, becomes `new`; `test` is to fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def planted(self, text: str) -> str:
        """Return the file's text with the fault in it."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {text.count(self.old)} times")
        return text.replace(self.old, self.new)


MUTATIONS = [
    # ------------------------------------------------------------------------ NumPy engine
    Mutation(
        "running maximum poisoned by a 0",
        HOST_ATTENTION,
        "np.maximum.reduce(flat, axis=1)",
        "np.maximum.reduce(flat, axis=1, initial=0)",
        f"{HOST_CASE}[case_13]",
    ),
    Mutation(
        "sums of earlier tiles not rescaled",
        HOST_ATTENTION,
        "np.multiply(state.numerator, rescale[..., None], out=state.numerator)",
        "rescale",
        f"{HOST_LAWS}[key_permutation]",
    ),
    Mutation(
        "normalised tile by tile",
        HOST_ATTENTION,
        "        if plan.divide_weights:",
        "        if True:",
        f"{HOST_LAWS}[weights_are_convex]",
    ),
    Mutation(
        "attention of float16 summed in float16",
        HOST_ATTENTION,
        "dtype = accumulator(problem.dtype)",
        "dtype = problem.dtype",
        f"{HOST_LAWS}[matches_oracle]",
    ),
    Mutation(
        "lse in base 2",
        HOST_ATTENTION,
        "maximum + np.log(normalizer)",
        "maximum + np.log2(normalizer)",
        f"{HOST_CASE}[case_12]",
    ),
    Mutation(
        "weights of hidden keys multiplied by their values",
        HOST_ATTENTION,
        "if np.count_nonzero(np.isfinite(mean)) < mean.size:",
        "if False:",
        f"{HOST_LAWS}[unseen_nonfinite_never_leaks]",
    ),
    Mutation(
        "softmax: running maximum poisoned by a 0",
        HOST_SOFTMAX,
        "m, total, loaded = block.constant(-np.inf)",
        "m, total, loaded = block.constant(0)",
        "tests/host/test_softmax_properties.py::test_property",
    ),
    Mutation(
        "softmax: sum of earlier tiles not rescaled",
        HOST_SOFTMAX,
        "total *= _exp(m, above)",
        "_exp(m, above)",
        HOST_LENGTHS,
    ),
    Mutation(
        "softmax of float16 summed in float16",
        HOST_SOFTMAX,
        "shape, dtype = problem.operand.shape, problem.accumulator",
        "shape, dtype = problem.operand.shape, problem.operand.dtype",
        f"{HOST_CASE}[case_02]",
    ),
    Mutation(
        "merge: parts not normalised",
        HOST_ONLINE,
        "[(w / divisor(total))[..., None] for w in weights]",
        "[w[..., None] for w in weights]",
        "tests/host/test_attention_properties.py::test_parts_merge_to_the_whole",
    ),
    # --------------------------------------------------------- gradients, NumPy engine
    Mutation(
        "scores stored for the backward",
        HOST_VJP,
        "    del workspace\n    sums = {",
        "    stored = np.ones((problem.forward.tq, problem.forward.tk))\n    sums = {",
        HOST_VJP_MEMORY,
    ),
    Mutation(
        "the cotangent of lse left out",
        HOST_VJP,
        "            delta -= self.results.dlse[..., rows]\n",
        "            pass\n",
        f"{HOST_VJP_LAWS}[gradient_of_lse]",
    ),
    Mutation(
        "the slope of the softcap left out",
        HOST_VJP,
        "ds *= slope",
        "ds *= 1",
        f"{HOST_VJP_LAWS}[finite_differences]",
    ),
    Mutation(
        "the last partial sum in place of their sum",
        HOST_VJP,
        "total += part\n",
        "total[...] = part\n",
        f"{HOST_VJP_LAWS}[broadcast_equals_repeated_then_summed]",
    ),
    Mutation(
        "hidden pairs multiplied by zero",
        HOST_VJP,
        "            return weighted_values(weights, x, seen)\n",
        "            pass\n",
        f"{HOST_VJP_LAWS}[unseen_nonfinite_never_leaks]",
    ),
    Mutation(
        "a sink's row without a key takes its dout",
        HOST_VJP,
        "            delta[self._blind(rows, visible)] = 0\n",
        "            pass\n",
        "tests/host/test_attention_vjp.py::test_case[case_sink_alone]",
    ),
    # --------------------------------------------------------------- its score pipeline
    Mutation(
        "mask of the first tile taken for all",
        HOST_SCORE,
        "block.mask[..., rows, keys]",
        "block.mask[..., rows, : keys.stop - keys.start]",
        f"{HOST_LAWS}[matches_oracle]",
    ),
    Mutation(
        "causal bound off by one",
        HOST_SCORE,
        "positions + problem.right)",
        "positions + problem.right + 1)",
        f"{HOST_LAWS}[causal_future_independence]",
    ),
    Mutation(
        "softcap without its cap",
        HOST_SCORE,
        "capped *= limit",
        "capped *= 1",
        f"{HOST_CASE}[case_softcap]",
    ),
    Mutation(
        "ALiBi distance with a sign",
        HOST_SCORE,
        "np.abs(positions - np.arange(keys.start, keys.stop))",
        "(positions - np.arange(keys.start, keys.stop))",
        f"{HOST_LAWS}[matches_oracle]",
    ),
    # ----------------------------------------------------------------------------- kernels
    Mutation(
        "sums of groups of tiles left aside",
        SIMT,
        "{ own += sum * factor; }",
        "{ own += 0 * sum * factor; }",
        f"{CUDA_GROUPS}[0-nan-float32]",
    ),
    Mutation(
        "normalizers of groups of tiles not rescaled",
        SIMT,
        "aside[row].l * weight(aside[row].m - now)",
        "aside[row].l",
        f"{CUDA_GROUPS}[1-inf-float32]",
    ),
    Mutation(
        "kernel: running maximum poisoned by a 0",
        SIMT,
        "state[i] = {sink, counts",
        "state[i] = {maximum(sink, A(0)), counts",
        f"{CUDA_CASE}[case_13]",
    ),
    Mutation(
        "kernel: sums of earlier tiles not rescaled",
        SIMT,
        "out[i][c] *= factor;",
        ";",
        CUDA_TILES,
    ),
    Mutation(
        "kernel: float16 sums kept in float16",
        SIMT,
        "state[i].l += sum;",
        "state[i].l = widen(narrow<T>(state[i].l + sum));",
        "tests/host_cuda/test_attention.py::test_sums_of_float16_are_kept_in_float32",
    ),
    Mutation(
        "kernel: one column of values taken for none",
        SIMT,
        "if (p.values > 0) {",
        "if (p.values > 1) {",
        f"{CUDA_LAWS}[matches_oracle]",
    ),
    Mutation(
        "kernel: tail of the last tile not masked",
        SIMT,
        "if (key < low || key >= high)",
        "if (key < low)",
        CUDA_TILES,
    ),
    Mutation(
        "kernel: shares of the keys not normalised",
        COMBINE,
        "return exponential(lse - reference) / total;",
        "return exponential(lse - reference);",
        "tests/host_cuda/test_attention.py::test_parts_merge_to_the_whole",
    ),
    Mutation(
        "kernel: parts of other warps left out of the merge",
        COMBINE,
        "whole = add(whole, sums[warp - own + w][c][lane]);",
        "whole = sums[warp][c][lane];",
        "tests/host_cuda/test_decode_mma.py::test_shares_are_merged",
    ),
    Mutation(
        "kernel: sums of a block's warps not brought to one reference",
        DECODE,
        "= exp2_approximate(states[i].x - sums.reference);",
        "= 1;",
        CUDA_DECODE,
    ),
    Mutation(
        "kernel: every row of a packed group has the first head's options",
        "kernels/attention/packed_rows.cuh",
        "row.index.on_axis[p.batch.count - 1] = member;",
        "row.index.on_axis[p.batch.count - 1] = 0;",
        CUDA_DECODE,
    ),
    Mutation(
        "kernel: tiles that may be empty come again instead of others",
        "kernels/lib/scheduler.cuh",
        "return int(tile + tile / single * paired);",
        "return int(tile);",
        "tests/host_cuda/test_scheduler.py::test_every_tile_is_taken_once",
    ),
    Mutation(
        "kernel: a sequence's last tile by the number of its first",
        "kernels/lib/sequences.cuh",
        "Index(found.end) / size",
        "Index(found.start) / size",
        "tests/host_cuda/test_varlen.py::test_ends_that_nobody_checked_are_held_within_the_arrays",
    ),
    Mutation(
        "kernel: mask of the first tile taken for all",
        SCORE,
        "matrix.at(at.row, at.key)",
        "matrix.at(at.row, at.key % 32)",
        f"{CUDA_LAWS}[matches_oracle]",
    ),
    Mutation(
        "kernel: softcap without its cap",
        SCORE,
        "return cap * hyperbolic_tangent(s / cap);",
        "return hyperbolic_tangent(s / cap);",
        f"{CUDA_CASE}[case_softcap]",
    ),
    Mutation(
        "gradient kernel: delta left out",
        PAIRS,
        "flow - state.delta",
        "flow",
        CUDA_VJP_TILES,
    ),
    Mutation(
        "gradient kernel: unseen pairs have weight",
        PAIRS,
        "? weight : kUnseen<A>",
        "? weight : weight",
        CUDA_VJP_TILES,
    ),
    Mutation(
        "gradient kernel: softcap without its slope",
        SCORE,
        "return (A(1) - t) * (A(1) + t);",
        "return A(1);",
        CUDA_VJP_TILES,
    ),
    Mutation(
        "gradient kernel: heads of a group not summed",
        BACKWARD,
        """            block.enter(p, entry);
            const EntryBounds& bounds""",
        """            if (entry > 0) break;
            block.enter(p, entry);
            const EntryBounds& bounds""",
        CUDA_VJP_TILES,
    ),
    Mutation(
        "gradient kernel: NaN of unseen queries in the second turn",
        BACKWARD,
        "add_weighted_rows<Tile::kWeightStride, kStride, true>(sum, own, columns, depth);",
        "add_weighted_rows<Tile::kWeightStride, kStride>(sum, own, columns, depth);",
        CUDA_VJP_TILES,
    ),
    Mutation(
        "gradient on tensor cores: delta left out",
        MMA_STEPS,
        "(flow - state.delta);",
        "flow;",
        CUDA_VJP_MMA,
    ),
    Mutation(
        "gradient on tensor cores: sums of dq not cleared",
        "kernels/attention/backward_mma.cu",
        "first[i] = make_float4(0, 0, 0, 0);",
        ";",
        CUDA_VJP_MMA,
    ),
    Mutation(
        "softmax kernel: a stack array of 4096 columns",
        ROWS,
        "column < p.columns; column += step)",
        "column < p.columns && column < 4096; column += step)",
        f"{CUDA_SOFTMAX}::test_a_million_terms_do_not_lose_each_other",
    ),
    Mutation(
        "softmax kernel: sum not rescaled",
        ONLINE,
        "l.scale(lane.raise(top));",
        "lane.raise(top);",
        f"{CUDA_SOFTMAX}::test_scores_that_rise_along_a_row",
    ),
    Mutation(
        "softmax kernel: merge of sums of different maxima",
        STATE,
        "add(relative_to(united), other.relative_to(united))",
        "add(relative_to(united), other.l)",
        "tests/host_cuda/test_online_softmax.py::test_merge_is_a_commutative_monoid",
    ),
    # ------------------------------------------------------------------------ inside JAX
    Mutation(
        "JAX: axes behind a vmapped one not moved",
        JAX_CALLS,
        "a if a is None or a < axis else a + 1",
        "a if a is None or a <= axis else a + 1",
        f"{JAX_ATTENTION}::test_vmap_of_any_axis_is_a_loop",
    ),
    Mutation(
        "JAX: cotangent of lse dropped",
        JAX_OPS,
        "if not isinstance(dlse, SymbolicZero):",
        "if False:",
        f"{JAX_ATTENTION}::test_a_cotangent_that_is_zero_is_not_read",
    ),
    Mutation(
        "JAX: gradients that nobody asked for",
        JAX_OPS,
        "if asked and name in _GRADIENT_OF",
        "if name in _GRADIENT_OF",
        f"{JAX_ATTENTION}::test_only_what_is_differentiated_is_computed",
    ),
    Mutation(
        "JAX: what devices share not told from what they have",
        JAX_OPS,
        "tuple(sorted(everywhere - mine, key=str))",
        "()",
        f"{JAX_ATTENTION}::test_shard_map_over_batch_and_heads",
    ),
    Mutation(
        "JAX: lengths not looked at",
        JAX_HOST,
        "        _check_lengths(call, arrays)\n",
        "        pass\n",
        f"{JAX_ATTENTION}::test_values_of_lengths",
    ),
    Mutation(
        "JAX: not on the stream of the call",
        JAX_DEVICE,
        "start(stream, pointer, 0)",
        "start(0, pointer, 0)",
        f"{JAX_EMULATED}::test_forward",
    ),
    Mutation(
        "JAX: sums of gradients in 16 bits",
        JAX_OPS,
        """return operand._replace(dtype="float32") if""",
        """return operand if""",
        f"{JAX_EMULATED}::test_gradients_of_16_bits_that_are_added_up_are_float32",
    ),
    Mutation(
        "JAX: an exception that XLA does not see",
        JAX_ABI,
        "return _error(frame, error)",
        "return None",
        "tests/jax/test_ffi_abi.py::test_an_exception_becomes_an_error",
    ),
    # ------------------------------------------------------------------------ fused chains
    Mutation(
        "dropout: key of the first round in all rounds",
        HOST_FUSED,
        "(key + turn * step) & 0xFFFFFFFF",
        "(key + 0 * step) & 0xFFFFFFFF",
        f"{HOST_CHAINS}::test_layer_norm[mask_is_the_oracles]",
    ),
    Mutation(
        "LayerNorm: variance about 0",
        HOST_FUSED,
        "    z -= mean\n    variance",
        "    variance",
        f"{HOST_CHAINS}::test_layer_norm[matches_oracle]",
    ),
    Mutation(
        "LayerNorm gradients: dx not dropped",
        HOST_FUSED,
        "dx = rows.drop(dz, box)",
        "dx = dz.copy()",
        f"{HOST_CHAINS}::test_layer_norm[vjp_matches_oracle]",
    ),
    Mutation(
        "product: bias after the activation",
        HOST_FUSED,
        "                product += shift\n"
        "                out[index][part] = ACTIVATIONS[problem.activation](product)",
        "                out[index][part] = ACTIVATIONS[problem.activation](product) + shift",
        f"{HOST_CHAINS}::test_matmul[matches_oracle]",
    ),
    Mutation(
        "dropout kernel: odd lanes of a row that begins within an octet",
        PHILOX,
        "words[w] >> 16 | words[w + 1] << 16",
        "words[w + 1] >> 16 | words[w + 1] << 16",
        f"{CUDA_CHAINS}::test_dropout_by_any_first_element",
    ),
    Mutation(
        "dropout kernel: the element at the threshold dropped",
        PHILOX,
        "(threshold - 1) * 0x10001",
        "threshold * 0x10001",
        f"{CUDA_CHAINS}::test_the_element_at_the_threshold_is_kept",
    ),
    Mutation(
        "LayerNorm kernel: rows read before they arrive",
        NORM,
        "if constexpr (kStaged) wait_for_copies<kStages - 1>();",
        "",
        f"{CUDA_CHAINS}::test_layer_norm_of_long_rows",
    ),
    Mutation(
        "LayerNorm kernel: sums of the first warp alone",
        NORM_ROWS,
        "part[w] = exchange[i][first + w];",
        "part[w] = exchange[i][first];",
        f"{CUDA_CHAINS}::test_layer_norm_of_long_rows",
    ),
    Mutation(
        "LayerNorm kernel: a variance that cancelled",
        NORM,
        "!kAtOnce || !(variance >= mean * mean)",
        "!kAtOnce",
        f"{CUDA_CHAINS}::test_rows_far_from_zero",
    ),
    Mutation(
        "LayerNorm gradient kernel: the second row of a pair not summed",
        NORM_VJP,
        "sums[kBias][i][e] += dz[e];",
        "sums[kBias][i][e] += r ? A(0) : dz[e];",
        f"{CUDA_CHAINS}::test_layer_norm_of_long_rows",
    ),
    Mutation(
        "product kernel: the last terms not fetched",
        MATMUL_MMA,
        "(p.depth + Shape::kDepth - 1) / Shape::kDepth",
        "p.depth / Shape::kDepth",
        f"{CUDA_CHAINS}::test_matmul_of_several_tiles",
    ),
    Mutation(
        "product kernel: a warp stores rows of the next",
        MATMUL_MMA,
        "min(rows - warp_row, Shape::kWarpRows)",
        "rows - warp_row",
        "tests/host_cuda/test_baselines.py::test_columns_that_are_no_chunks",
    ),
    Mutation(
        "wide product kernel: operands read before they arrive",
        MATMUL_WIDE,
        "wait_for_copies<kStages - 2>();",
        "wait_for_copies<kStages - 1>();",
        f"{CUDA_CHAINS}::test_matmul_of_several_tiles",
    ),
    Mutation(
        "wide product kernel: sums of the first terms lost",
        MATMUL_WIDE,
        "total = first ? x : total + x;",
        "total = x;",
        f"{CUDA_CHAINS}::test_matmul_of_many_terms",
    ),
    Mutation(
        "wide product kernel: infinite results as their parts give them",
        MATMUL_WIDE,
        "left_out |= 1ull << n;",
        "left_out |= 0ull << n;",
        f"{CUDA_CHAINS}::test_matmul[mma-of_extremes]",
    ),
    Mutation(
        "wide product kernel: the small parts of a left out",
        MATMUL_WIDE,
        "a[e / 2].set(e % 2 * 2 + i, x.element[e]);",
        "{ a[e / 2].set(e % 2 * 2 + i, x.element[e]); a[e / 2].small[e % 2 * 2 + i] = 0; }",
        f"{CUDA_CHAINS}::test_matmul_of_several_tiles",
    ),
    Mutation(
        "plain product kernel: bias of the tile's first column",
        MATMUL_SIMT,
        "static_cast<const T*>(p.bias)[first_column + at]",
        "static_cast<const T*>(p.bias)[first_column]",
        f"{CUDA_CHAINS}::test_matmul",
    ),
    Mutation(
        "half of attention: a NaN anywhere changes how every row is computed",
        "cuflash/device/baselines.py",
        "    out[...] = np.where(np.isfinite(both[1]), *both).astype(problem.dtype)\n",
        "    out[...] = seen\n",
        "tests/host_cuda/test_baselines.py::test_rows_that_do_not_see_nan_keep_their_bits",
    ),
    Mutation(
        "half of attention: sinks left out of the sums",
        SCORES_MMA,
        "state[i].begin(block.score.sink, lane % 4 == 0)",
        "state[i].begin(-infinity<float>(), lane % 4 == 0)",
        "tests/host_cuda/test_baselines.py::test_each_width_of_heads",
    ),
]


def _failed(tree: Path, tests: Iterable[str]) -> bool:
    """Run tests in a tree; RuntimeError if that was not possible."""
    command = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def caught(mutations: Iterable[Mutation]) -> Iterator[tuple[Mutation, bool]]:
    """Plant each fault in a copy of the tree and yield whether its test caught it.

    Raises
    ------
    RuntimeError
        If a test fails without a fault, or cannot be run.
    """
    mutations = list(mutations)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_NOT_COPIED)
        if _failed(tree, dict.fromkeys(mutation.test for mutation in mutations)):
            raise RuntimeError("the tests fail without any fault")
        for mutation in mutations:
            path = tree / mutation.file
            right = path.read_text("utf-8")
            path.write_text(mutation.planted(right), "utf-8")
            yield mutation, _failed(tree, [mutation.test])
            path.write_text(right, "utf-8")


def main(words: Sequence[str]) -> int:
    """Print what became of the faults whose names have one of the words; return the exit code."""
    wanted = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    survived = 0
    start = time.monotonic()
    for mutation, found in caught(wanted):
        survived += not found
        now = time.monotonic()
        print(f"{mutation.name}\n    {mutation.file}")
        print(f"    {'caught by' if found else 'SURVIVED'} {mutation.test} ({now - start:.0f} s)")
        sys.stdout.flush()
        start = now
    print(f"{len(wanted) - survived} of {len(wanted)} faults caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

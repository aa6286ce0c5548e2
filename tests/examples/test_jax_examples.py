"""The examples in JAX run, hold what they promise, and fail where they do not hold it."""

import pytest

pytest.importorskip("jax")

from examples import jax_attention, jax_float64


def test_training_with_either_attention(monkeypatch, capsys):
    monkeypatch.setattr(jax_attention, "BLOCKS", 1)  # programs that compile faster
    jax_attention.main([])
    lines = capsys.readouterr().out.splitlines()
    for line, dtype in zip(lines[1:], jax_attention.TOLERANCE, strict=True):
        name, first, last, ours, _ = line.split()
        assert name == dtype
        assert float(first) - float(last) > 1
        assert ours == last or dtype == "bfloat16"


def test_training_fails_where_losses_part(monkeypatch, capsys):
    def losses(attention, dtype, steps, text):
        ours = attention is jax_attention.cuflash.jax.dot_product_attention
        return [4.0, 3.0 + 1e-4 * ours]

    monkeypatch.setattr(jax_attention, "train", losses)
    with pytest.raises(SystemExit, match=r"losses in float32 are 3\.3e-05 apart, not 1e-06"):
        jax_attention.main([])


@pytest.mark.parametrize("tokens", ["96", "128"])  # with 128 the terms of the loss cancel
def test_float64_with_a_pair_bias(tokens, capsys):
    jax_float64.main(["--tokens", tokens])
    theirs, ours = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:])
    scratch, *errors = zip(map(float, theirs), map(float, ours), strict=True)
    assert scratch[1] < scratch[0] / 4
    for of_jax, of_cuflash in errors:
        assert of_cuflash < of_jax * 1e-4


def test_float64_needs_a_gradient(capsys):
    with pytest.raises(SystemExit):
        jax_float64.main(["--tokens", "1"])
    assert "the gradient is 0" in capsys.readouterr().err


def test_float64_fails_where_it_is_not(monkeypatch, capsys):
    def single(**operands):
        narrow = {name: x.astype("float32") for name, x in operands.items()}
        return right(**narrow).astype("float64")

    right = jax_float64.cuflash.jax.dot_product_attention
    monkeypatch.setattr(jax_float64.cuflash.jax, "dot_product_attention", single)
    with pytest.raises(SystemExit, match="above 1e-13"):
        jax_float64.main(["--tokens", "32"])

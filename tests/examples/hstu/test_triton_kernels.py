"""The logic of the kernels, without a GPU: Triton interprets them."""

from tests.examples.hstu.interpreter import interpret, needs_triton


@needs_triton
def test_interpreted_kernels_agree_with_the_padded_reference() -> None:
    errors = [float(line) for line in interpret("interpreted_kernels.py").split()]
    assert len(errors) == 2 * 3  # attentions, batches
    assert max(errors) < 1e-6

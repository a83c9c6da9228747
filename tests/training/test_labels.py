import torch

from evenrank.training import label_bits


def test_each_task_is_a_bit_of_the_label() -> None:
    bits = label_bits(torch.tensor([0, 1, 6, 255]), 3)
    assert bits.tolist() == [[0, 0, 0], [1, 0, 0], [0, 1, 1], [1, 1, 1]]
    assert bits.dtype == torch.float32


def test_no_labels_give_an_empty_tensor() -> None:
    assert label_bits(torch.zeros(0, dtype=torch.int64), 8).shape == (0, 8)

"""Runs whole layers in Triton's interpreter, on the CPU, beside layers by parts."""

from tests.examples.hstu.whole_layers import check_layers


def main() -> None:
    """Compare them; an AssertionError says what differs."""
    check_layers(mode="fp32", device="cpu")


if __name__ == "__main__":
    main()

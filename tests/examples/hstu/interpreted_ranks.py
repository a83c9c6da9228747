"""Runs layers whose heads are divided among ranks of torchrun, in Triton's interpreter; see `test_fused.py`."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.examples.hstu.exactness import check_divided_layers

if __name__ == "__main__":
    dist.init_process_group("gloo")
    check_divided_layers(mode="fp32", mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    dist.destroy_process_group()

"""GPUs that are not there: programs are compiled for H200s on any machine, to see what they would run, hold and exchange.

pip install 'jax[cuda12]'          # XLA's compiler for GPUs, in the version of the JAX that is installed; no driver is needed

What is compiled so cannot be timed, and XLA, which cannot try out products either, takes its default for each.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from experiments.config import ConfigError

# Where there is no driver JAX would fail to ask it for its version, and leave the compiler out.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H200"
"""
"""What XLA asks of a GPU when it is there."""
NAME = "gpu: NVIDIA H200, compiled for and not run"


def gpus(count: int = 1) -> list[Any]:
    """So many H200s in one machine, to compile for."""
    try:
        found = topologies.get_topology_desc(
            topology_name="", platform="cuda", target_config=H200, topology=f"1x1x{count}"
        )
    except Exception as error:
        raise ConfigError(
            f"there is no compiler for GPUs here ({' '.join(str(error).split())[:150]}); install it with: pip install "
            f"'jax[cuda12]=={jax.__version__}'"
        ) from error
    return list(found.devices)


@contextlib.contextmanager
def named() -> Iterator[None]:
    """What is lowered inside is for an H200, without XLA's compiler for GPUs: from 0.12 on JAX asks for which GPU a kernel is."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("alone",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        yield


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """What is traced inside is what would be traced where there is a GPU."""
    with mock.patch("jax.default_backend", lambda: "gpu"):
        yield

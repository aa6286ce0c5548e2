"""Limits of devices, for plans made without them."""

from cuflash.device.executor import DeviceLimits

H200 = DeviceLimits(
    compute_capability="90",
    multiprocessors=132,
    threads_per_sm=2048,
    registers_per_sm=65536,
    shared_per_sm=233472,
    shared_per_block=232448,
    l2_bytes=60 << 20,
    cluster_blocks=16,
)
T4 = DeviceLimits(
    compute_capability="75",
    multiprocessors=40,
    threads_per_sm=1024,
    registers_per_sm=65536,
    shared_per_sm=65536,
    shared_per_block=65536,
    l2_bytes=4 << 20,
)

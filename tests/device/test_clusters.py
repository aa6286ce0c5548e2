"""What the driver is asked about clusters, with a driver that is not there."""

import ctypes
from types import SimpleNamespace

import pytest

from cuflash.device import clusters
from cuflash.device.compiler import KernelName, Launch


@pytest.mark.parametrize(("fits", "status", "found"), [(7, 0, 7), (0, 0, 1), (0, 1, None)])
def test_the_driver_is_asked_about_the_launch(fits, status, found, monkeypatch):
    asked = []

    def occupancy(count, function, configuration):
        attribute = configuration._obj.attributes[0]
        shapes = [tuple(shape) for shape in (configuration._obj.grid, configuration._obj.block)]
        asked.append((function.value, *shapes, attribute.id, tuple(attribute.value[:4])))
        asked.append((configuration._obj.shared_bytes, configuration._obj.attribute_count))
        count._obj.value = fits
        return status

    driver = SimpleNamespace(cuOccupancyMaxActiveClusters=occupancy)
    monkeypatch.setattr(clusters, "cuda_driver", lambda: driver)
    monkeypatch.setattr(clusters, "load", lambda kernel, device: SimpleNamespace(ptr=1 << 40))
    launch = Launch(KernelName("file", f"kernel {fits} {status}"), 128, 512, 221_952, 16)
    if found is None:
        with pytest.raises(RuntimeError, match="cuOccupancyMaxActiveClusters: error 1"):
            clusters.fitting_clusters(launch, 0)
    else:
        assert clusters.fitting_clusters(launch, 0) == found
        assert clusters.fitting_clusters(launch, 0) == found
    assert asked == [
        (1 << 40, (128, 1, 1), (512, 1, 1), 4, (16, 1, 1, 0)),
        (221_952, 1),
    ]
    # As cuda.h lays them out.
    assert (ctypes.sizeof(clusters._Attribute), clusters._Attribute.value.offset) == (72, 8)
    offsets = [getattr(clusters._Configuration, name).offset for name in ("stream", "attributes")]
    assert (offsets, ctypes.sizeof(clusters._Configuration)) == ([32, 40], 56)

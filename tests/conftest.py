"""Device tests are skipped where there is no such device; everything else runs everywhere."""

from __future__ import annotations

import pytest

from cp_core.device import device_type


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip ``gpu`` and ``npu`` tests on machines without one."""
    present = {"cuda": "gpu", "npu": "npu"}.get(device_type())
    for item in items:
        for marker in ("gpu", "npu"):
            if item.get_closest_marker(marker) and marker != present:
                item.add_marker(pytest.mark.skip(reason=f"needs a device: {marker}"))

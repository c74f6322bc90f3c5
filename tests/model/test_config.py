"""What a wrapper was constructed with."""

import types

import pytest

import jdp


class DescribedMesh:
    """A mesh over a device of a topology, for which the compilers need not be installed."""

    all_devices = devices = (types.SimpleNamespace(device_kind="NVIDIA H100"),)
    is_described = True


def test_on_other_devices_a_wrapper_is_described_if_those_are():
    here = jdp.DataParallel(lambda w, x: w * x, devices=[0])._config
    described = here.on(DescribedMesh())
    assert described.is_described and not here.is_described
    with pytest.raises(RuntimeError, match=r"jdp\.DataParallel: called on NVIDIA H100 devices of a topology"):
        described.refuse_described()
    back = described.on(here.mesh)
    assert not back.is_described
    back.refuse_described()

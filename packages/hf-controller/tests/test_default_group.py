from __future__ import annotations

import sys

import pytest

from hf_controller.default_group import Rendezvous, _choose_interface


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
def test_the_interface_is_the_one_that_reaches_the_rendezvous():
    assert _choose_interface(None, on_one_machine=False) == "lo"
    assert _choose_interface(Rendezvous("192.0.2.1", 1, "token"), on_one_machine=True) == "lo"
    assert _choose_interface(Rendezvous("127.0.0.1", 1, "token"), on_one_machine=False) == "lo"
    assert _choose_interface(Rendezvous("no such address", 1, "token"), on_one_machine=False) is None

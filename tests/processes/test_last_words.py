"""What a process says to the others as it ends."""

import threading

import pytest

from jdp._processes import last_words


class Service:
    """JAX's coordination service, of one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        self.values[key] = value


def test_who_fails_as_it_ends_has_left_all_the_same(monkeypatch):
    """Else the others would wait for it until their time is over."""
    service, leaving = Service(), threading.Event()
    listener = threading.Thread(target=leaving.wait)
    monkeypatch.setattr(last_words, "client", lambda: service)
    monkeypatch.setattr(last_words, "own_process", lambda: 3)
    listener.start()

    def fails():
        raise RuntimeError("a program has failed on the device")

    monkeypatch.setattr(last_words, "_before_leaving", [fails])
    try:
        with pytest.raises(RuntimeError, match="a program has failed on the device"):
            last_words._leave(leaving, listener)
        assert service.values == {"jdp/left/3": ""}
        assert not listener.is_alive()
    finally:
        leaving.set()

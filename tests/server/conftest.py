"""What every test of the server has."""

from __future__ import annotations

import pytest

from tests.support.served import PATIENCE


@pytest.fixture(autouse=True)
def _errors_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error gives a status however busy the machine is: a stream that has to wait for its first
    token begins without it after two seconds otherwise.
    """
    monkeypatch.setattr("dspine.server.completions._SOON", PATIENCE)

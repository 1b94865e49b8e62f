"""What a log reads of an outage: one warning when it begins, one when it is over."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class Outage:
    """Whether we are out of touch with the swarm."""

    def __init__(self) -> None:
        self._is_on = False

    def announced(self) -> None:
        """It has begun, and whoever noticed has said so."""
        self._is_on = True

    def goes_on(self, why: str) -> None:
        """An attempt to reach the swarm has failed."""
        level = logging.DEBUG if self._is_on else logging.WARNING
        _log.log(level, "lost touch with the swarm, trying again: %s", why)
        self._is_on = True

    def is_over(self) -> None:
        """An attempt has succeeded; nothing is said when none had failed."""
        if self._is_on:
            _log.warning("in touch with the swarm again")
        self._is_on = False

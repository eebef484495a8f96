"""What a check of ``spotgrpo doctor`` is, and how checks are run so that none hides another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias

from spotgrpo.shared.errors import ConfigError, SpotGRPOError, TransientError
from spotgrpo.shared.log import redact

log = logging.getLogger(__name__)

State: TypeAlias = Literal["ok", "warn", "fail", "unreached"]

EXIT_CODES: Final[dict[State, int]] = {"ok": 0, "warn": 0, "fail": 2, "unreached": 3}


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at ("broker").
        state: ``warn`` does not stop a run; ``unreached`` is a server that did not answer.
        detail: what was found.
        remedy: what to do about it; empty where nothing is wrong.
    """

    name: str
    state: State
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The finding as JSON types."""
        return asdict(self)


Finding: TypeAlias = Callable[[], "Check | Iterable[Check]"]


def run_checks(findings: Sequence[tuple[str, Finding]]) -> list[Check]:
    """Every check's findings in order; one that raises is a finding itself, and the others go on."""
    found: list[Check] = []
    for name, finding in findings:
        try:
            result = finding()
            found += [result] if isinstance(result, Check) else list(result)
        except SpotGRPOError as exc:
            found.append(from_error(name, exc))
        except Exception as exc:  # the other checks still have something to say
            log.debug("check %s", name, exc_info=exc)
            detail = redact(f"{type(exc).__name__}: {exc}")
            found.append(
                Check(name, "fail", detail, "a fault of this program: see log.level=debug")
            )
    return found


def from_error(name: str, error: SpotGRPOError) -> Check:
    """An error as a finding."""
    message = redact(str(error))
    if isinstance(error, TransientError):
        return Check(
            name, "unreached", message, "check the address, the network and that the server runs"
        )
    if isinstance(error, ConfigError):
        what = message.removesuffix(f": {error.remedy}")
        return Check(name, "fail", what, redact(error.remedy))
    return Check(name, "fail", message, "see the message")


def exit_code(checks: Iterable[Check]) -> int:
    """0 where nothing failed, 2 where something did, 3 where only servers did not answer."""
    states = {check.state for check in checks}
    return 2 if "fail" in states else 3 if "unreached" in states else 0

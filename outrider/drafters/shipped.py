"""Heads that come with this package: folders in `shipped/`, each for the model that its config.json identifies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.models.heads.checkpoint import kind_of, open_head
from outrider.models.heads.config import HeadKind
from outrider.models.heads.save import IDENTITY
from outrider.models.identity import ModelIdentity, has_shape, identify

SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """A head of this package."""

    folder: Path
    kind: HeadKind
    target: ModelIdentity

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def drafter(self) -> str:
        """The drafter that runs it, by its registered name."""
        return "eagle" if self.kind == "eagle3" else self.kind


def shipped_heads() -> Iterator[ShippedHead]:
    """All shipped heads, sorted by name. ConfigError where one is damaged."""
    for file in sorted(SHIPPED.glob("*/config.json")):
        try:
            target = ModelIdentity(**json.loads(file.read_text(encoding="utf-8"))[IDENTITY])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file} does not say which model its head is for ({error!r}); reinstall it") from error
        yield ShippedHead(file.parent, kind_of(open_head(str(file.parent))), target)


def shipped_folder(drafter: str, folder: Path | None, train: str) -> str:
    """The head that a drafter takes for the model in a folder where none is named. ConfigError where there is none.

    train: the command that makes such a head.
    """
    if folder is None:
        raise ConfigError(f"{drafter} needs a head: {drafter}:model=FOLDER, one that was trained for this target")
    found = shipped_for(folder)
    if found is None or found.drafter != drafter:
        raise ConfigError(
            f"{drafter}: no head is shipped for the model in {folder}; name one that was trained for it, "
            f"{drafter}:model=FOLDER, train one with `outrider train {train}`, or choose another drafter: suffix"
        )
    return str(found.folder)


def shipped_for(target: Path) -> ShippedHead | None:
    """The head for the model in a folder; None where there is none, or the folder holds no sound model."""
    with suppress(ConfigError):
        for head in shipped_heads():
            if has_shape(target, head.target) and identify(target) == head.target:
                return head
    return None

"""The small file of settings that `forerun tune` writes and `generate` and `load` take.

::

    {"schema": 1, "controller": "gammatune(eta=0.2)", "rule": null, "draft": null, "about": {...}}

Every key but `schema` may be left out or null: then it is not decided here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.controllers import CONTROLLERS
from forerun.errors import SettingError, UnknownNameError, require

SCHEMA = 1
_TEXTS = ("controller", "rule", "draft")


@dataclass(frozen=True)
class Settings:
    """What a run uses besides its prompts and models; None is left to whoever runs.

    Args:
        controller: the spec of a controller.
        rule: the spec of an acceptance rule.
        draft: a model or the spec of a drafter.
        about: how the settings were made; nothing reads it.

    Raises:
        SettingError: a controller or rule that cannot be made.
    """

    controller: str | None = None
    rule: str | None = None
    draft: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise SettingError(f"{name} must be text or null, got {value!r}")
        if not isinstance(self.about, Mapping):
            raise SettingError(f"about must be an object, got {self.about!r}")
        if self.controller is not None:
            CONTROLLERS.make(self.controller)
        if self.rule is not None:
            from forerun.rules import RULES

            RULES.make(self.rule)

    @classmethod
    def read(cls, path: str | Path) -> Settings:
        """Load a file.

        Raises:
            SettingError: not such a file, of another schema, with an unknown key (its nearest is
                named) or with a value that cannot be used.
            OSError: the file cannot be read.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingError(f"{path} is not a settings file: {error}") from error
        if not isinstance(document, dict) or "schema" not in document:
            raise SettingError(f'{path} is not a settings file; it needs "schema": {SCHEMA}')
        if document["schema"] != SCHEMA:
            raise SettingError(
                f"{path} has settings schema {document['schema']!r} and this forerun reads {SCHEMA}"
            )
        known = ["schema", *_TEXTS, "about"]
        for key in document:
            if key not in known:
                raise UnknownNameError.among(f"key in {path}", key, known)
        given = {key: document[key] for key in known[1:] if document.get(key) is not None}
        try:
            return cls(**given)
        except SettingError as error:
            raise type(error)(f"{path}: {error}") from error

    def write(self, path: str | Path) -> None:
        """Save as a file that `read` loads; `OSError` if it cannot be written."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        """The text of the file."""
        value = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)


def resolve(
    settings: Settings | str | Path | None = None,
    *,
    controller: str | None = None,
    rule: str | None = None,
    draft: str | None = None,
) -> Settings:
    """What is in force: each option that was given, else the one of `settings` (perhaps in a file,
    read by `Settings.read`), else None.

    >>> tuned = Settings(controller="fixed(3)", rule="exact")
    >>> resolve(tuned, controller="fixed(8)").controller, resolve(tuned).rule
    ('fixed(8)', 'exact')
    """
    if isinstance(settings, (str, Path)):
        settings = Settings.read(settings)
    good = settings is None or isinstance(settings, Settings)
    require(good, "settings", settings, "a file or what was read from one")
    given: dict[str, Any] = {"controller": controller, "rule": rule, "draft": draft}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(settings or Settings(), **given)

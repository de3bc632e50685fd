"""The exception tree: drawn as it is, with codes and exit statuses that programs may rely on."""

from __future__ import annotations

import pickle
import re

import pytest

from rota.spec import errors


def leaves(cls: type[errors.RotaError]) -> list[type[errors.RotaError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        if sub.__module__ == errors.__name__:
            found += leaves(sub)
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = {
        name: (int(exit_status), int(http), code)
        for name, exit_status, http, code in re.findall(
            r"^[\s|+-]*(\w+)\s+(\d+)\s+(\d{3})\s+([A-Z_]+)", errors.__doc__ or "", re.MULTILINE
        )
    }
    real = {cls.__name__: (cls.exit, cls.http, cls.code) for cls in leaves(errors.RotaError)}
    assert drawn == real


@pytest.mark.parametrize("cls", leaves(errors.RotaError), ids=lambda cls: cls.__name__)
def test_an_error_crosses_processes_with_its_fields(cls: type[errors.RotaError]) -> None:
    error = cls(("one problem",), hint="mend it") if cls is errors.JobFileError else cls("text", hint="next", role="r")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert getattr(again, "fields", {}) == error.fields

"""The same model in one process, without Rota: the figures that the job must reach."""

from __future__ import annotations

import json

from online_drift import Model, features, rows

if __name__ == "__main__":
    model = Model()
    for row in rows():
        model.step(features(row))
    print(json.dumps(model.figures(), indent=1))

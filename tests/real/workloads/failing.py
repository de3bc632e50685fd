"""An unmodified torchrun script whose rank 1 raises in step 3; loads nothing, so that it fails soon."""

import os
import time

for step in range(1, 1000):
    if step == 3 and os.environ["RANK"] == "1":
        raise ValueError(f"planned failure in step {step}")
    time.sleep(0.1)

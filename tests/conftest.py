"""Before torch is imported: tests share their cores with servers that they start."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import os

# Before JAX starts: the tests must not take, or wait for, an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

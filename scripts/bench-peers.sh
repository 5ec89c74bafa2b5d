#!/usr/bin/env bash
# Makes build/peers, an environment of what `make bench` compares with: 5 GB that nothing else needs.
source "$(dirname "$0")/common.sh"

peers=build/peers
requirements=build/peers-requirements.txt
.venv/bin/python - >$requirements <<'PY'
import tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["peers"]))
PY
if ! cmp -s $requirements $peers/requirements.txt; then
  say "installing the peers into $peers (5 GB, some minutes)"
  [ -x $peers/bin/python ] || .venv/bin/python -m venv $peers
  quietly bench-peers $peers/bin/python -m pip install -r $requirements
  cp $requirements $peers/requirements.txt
fi
say "ready: $peers"

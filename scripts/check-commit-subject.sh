#!/usr/bin/env bash
# Refuses a commit whose first line is not "area: what it does" in at most 72 characters.
set -euo pipefail
subject=$(head -n 1 "$1")
if [[ $subject =~ ^(Merge|Revert|fixup!|squash!) ]]; then
  exit 0
fi
if [[ ! $subject =~ ^[a-z0-9_./,-]+(:\ [a-z0-9_./,-]+)*:\ .+ || ${#subject} -gt 72 ]]; then
  echo "commit subject must read 'area: what it does' in at most 72 characters, got (${#subject}): $subject" >&2
  exit 1
fi

#!/usr/bin/env bash
# jax-cce's own tests against cutloss.jax: its source distribution is downloaded to a temporary folder, the import of its
# function is swapped, and pytest runs there. Nothing of it stays.
source "$(dirname "$0")/common.sh"

python=$PWD/.venv/bin/python
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! "$python" -m pip download --quiet --no-deps --no-binary :all: --dest "$folder" jax-cce==0.1.0; then
  die "jax-cce 0.1.0 could not be downloaded, see above: this step needs a package index that pip can reach"
fi
tar -xzf "$folder"/jax_cce-0.1.0.tar.gz -C "$folder" --strip-components=1
tests=$folder/tests/test_core.py
sed -i 's/^from jax_cce import linear_cross_entropy$/from cutloss.jax import linear_cross_entropy/' "$tests"
rm -rf "$folder/src"
grep -q '^from cutloss.jax import' "$tests" || die "$tests imports its function in another way: nothing was tested"
! grep -q '\bjax_cce\b.*import\|import jax_cce' "$tests" || die "$tests still imports jax_cce"
say "jax-cce's tests against cutloss.jax"
cd "$folder"
"$python" -m pytest -q -p no:cacheprovider tests

#!/usr/bin/env bash
# Installs the library to a temporary prefix and builds a consumer against it three ways: find_package, pkg-config,
# add_subdirectory.
source "$(dirname "$0")/../../scripts/common.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --preset release
cmake --build --preset release
cmake --install build/release --prefix "$work/prefix"

consumer=tests/install
cmake -S $consumer -B "$work/package" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/package"
"$work/package/consumer"

cmake -S $consumer -B "$work/subdirectory" -DCMAKE_BUILD_TYPE=Release -DCUTLOSS_SOURCE_DIR="$PWD"
cmake --build "$work/subdirectory" --target consumer
"$work/subdirectory/consumer"

# The .pc file names the prefix it was configured with, which a relocated install overrides.
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name cutloss.pc)")
# shellcheck disable=SC2046  # flags are words
"${CXX:-g++}" -std=c++20 $consumer/consumer.cc -o "$work/consumer" \
  $(pkg-config --define-variable=prefix="$work/prefix" --static --cflags --libs cutloss)
"$work/consumer"
echo "an installed cutloss works by find_package, add_subdirectory and pkg-config"

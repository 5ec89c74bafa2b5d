#!/usr/bin/env bash
# Installs the library to a temporary prefix and builds a C++ and a C program against it three ways: find_package,
# pkg-config, add_subdirectory.
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
"$work/package/consumer_c"

cmake -S $consumer -B "$work/subdirectory" -DCMAKE_BUILD_TYPE=Release -DCUTLOSS_SOURCE_DIR="$PWD"
cmake --build "$work/subdirectory" --target consumer consumer_c
"$work/subdirectory/consumer"
"$work/subdirectory/consumer_c"

# The .pc file names the prefix it was configured with, which a relocated install overrides.
export PKG_CONFIG_PATH
PKG_CONFIG_PATH=$(dirname "$(find "$work/prefix" -name cutloss.pc)")
flags=$(pkg-config --define-variable=prefix="$work/prefix" --static --cflags --libs cutloss)
# shellcheck disable=SC2086  # flags are words
"${CXX:-g++}" -std=c++20 $consumer/consumer.cc -o "$work/consumer" $flags
"$work/consumer"
# shellcheck disable=SC2086
"${CC:-gcc}" -std=c11 $consumer/consumer.c -o "$work/consumer_c" $flags -lm
"$work/consumer_c"
echo "an installed cutloss works by find_package, add_subdirectory and pkg-config"

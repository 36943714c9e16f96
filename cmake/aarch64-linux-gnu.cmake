# SPDX-License-Identifier: Apache-2.0
# 64-bit ARM by Debian's cross compiler; qemu-user runs the tests (packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross,
# qemu-user; tools/deps.sh compilers).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64;-L;/usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
# The one foreign header of the core is the same for every machine, but lies among headers that are not.
if(EXISTS /usr/include/xxhash.h)
  file(COPY /usr/include/xxhash.h DESTINATION ${CMAKE_BINARY_DIR}/foreign)
  set(AKV_XXHASH_INCLUDE ${CMAKE_BINARY_DIR}/foreign CACHE PATH "folder of xxhash.h")
endif()

# SPDX-License-Identifier: Apache-2.0
# A thin front to tools/deps.sh and CMake. The default target explains itself.
#   JOBS=N        parallel jobs            PREFIX=DIR, DESTDIR=DIR   where install puts things
#   AKV_DEPS=DIR  dependencies, if not in .deps/
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
export AKV_JOBS ?= $(JOBS)

help:
	@echo 'make demo     bring what is missing, then answer questions about a real text from its compressed cache'
	@echo 'make check    bring what is missing, build, run all tests; the core also under ASan and UBSan'
	@echo 'make build    the library, the llama.cpp host and the akv command, in build/release/'
	@echo 'make bench    attention from the compressed form against ggml, one layer (akv bench)'
	@echo 'make install  what build made, into PREFIX (now: $(PREFIX))'
	@echo 'make deps     only bring the dependencies (.deps/, or AKV_DEPS)'
	@echo 'make clean    remove build/ (dependencies stay; rm -rf .deps removes them)'

deps:
	@tools/deps.sh packages llama model

build:
	@tools/deps.sh packages llama
	@tools/build.sh release

check: deps
	@tools/check.sh

demo: build
	@tools/deps.sh model
	@python3 demo/demo.py

bench: build
	@build/release/cli/akv bench

install: build
	DESTDIR='$(DESTDIR)' cmake --install build/release --prefix '$(PREFIX)'

clean:
	rm -rf build

.PHONY: help deps build check demo bench install clean

# SPDX-License-Identifier: Apache-2.0
# A thin front to tools/deps.sh and CMake. The default target explains itself.
#   JOBS=N        parallel jobs            PREFIX=DIR, DESTDIR=DIR   where install puts things
#   AKV_DEPS=DIR  dependencies, if not in .deps/       TOKENS=N, RATIO=X, DENSE=1   of demo-large
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX ?= /usr/local
TOKENS ?= 8000
RATIO ?= 10
T ?= 60
export AKV_JOBS ?= $(JOBS)

help:
	@echo 'make demo     bring what is missing, then answer questions about a real text from its compressed cache'
	@echo 'make demo-large  the same with a 1.5B model (1.1 GB to fetch) and a document of TOKENS=$(TOKENS); minutes, not seconds'
	@echo 'make check    bring what is missing, build, run all tests; the core also under ASan and UBSan'
	@echo 'make check-python  the wheel, the transformers cache, the kvpress press; brings PyTorch (2.5 GB) into .deps/python'
	@echo 'make check-page  the page of akv serve in headless Chromium, which it brings (100 MB to fetch)'
	@echo 'make check-compilers  other compilers, another C library, 32 bit, clang-tidy, cppcheck; tools/deps.sh compilers brings them'
	@echo 'make build    the library, the llama.cpp host and the akv command, in build/release/'
	@echo 'make bench    attention from the compressed form against ggml, one layer (akv bench)'
	@echo 'make fuzz     libFuzzer over files, segments, compression and requests, T=60 seconds each (needs clang)'
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

check-page: build
	@tools/deps.sh model browser
	@python3 tests/cli/test_page.py --require --akv build/release/cli/akv --text demo/gpl-2.txt \
	    --model '$(or $(AKV_DEPS),.deps)/models/SmolLM2-135M-Instruct.Q4_1.gguf'

check-python:
	@tools/deps.sh packages
	@tools/check_python.sh

check-compilers: build
	@tools/check_compilers.sh

demo: build
	@tools/deps.sh model
	@python3 demo/demo.py

demo-large: build
	@bench/quality/fetch_model.sh '$(or $(AKV_DEPS),.deps)/models/qwen2.5-coder-1.5b'
	@python3 demo/large.py --tokens $(TOKENS) --ratio $(RATIO) $(if $(DENSE),--dense)

bench: build
	@build/release/cli/akv bench

fuzz:
	@tools/fuzz.sh $(T)

install: build
	DESTDIR='$(DESTDIR)' cmake --install build/release --prefix '$(PREFIX)'

clean:
	rm -rf build

.PHONY: help deps build check check-page check-python check-compilers demo demo-large bench fuzz install clean

# awa_queue: build, install, test.
#
#   make                        the release library for the PostgreSQL that PG_CONFIG names
#   make install                puts it into that PostgreSQL (DESTDIR is respected); make uninstall takes it out
#   make deb                    a Debian package of it in target/deb, for the major of PG_CONFIG; make dist: the sources for PGXN
#   make installcheck           pg_test/ against the running server that PGHOST, PGPORT and PGUSER name
#
#   make demo                   for a first look: a private server, real jobs, and a proof that each was done once
#   make test                   everything CI runs: lint, unit tests, PostgreSQL 15, 16 and 18
#   make bench                  the figures of bench/
#   make setup | lint | unit | private | test-15 | test-18 | test-16
#
# demo and bench are started with these in their environment:
#   AWA_PG_BIN    programs of a private PostgreSQL 15 that has the release build
#   AWA_PGROOT    folder of all private installations: AWA_PGROOT/MAJOR-FLAVOUR/bin
#   AWA_MAJOR     15
#   AWA_PYTHON    a Python with psycopg and pytest
#   PYTHONPATH    tests/, so that `from harness import Cluster` works
# install and deb take PACKAGE=FOLDER, a folder that tools/build printed: then nothing is compiled. docs/install.md is for DBAs.
# Any other way to use a private installation: tools/README.md.

PG_CONFIG ?= pg_config
SHELL := /bin/bash

# $(call package,) builds when something has changed, and is the folder of what is to be installed.
# Empty, and not taken from the environment: other tools use that name.
PACKAGE =
package = $(if $(PACKAGE),'$(PACKAGE)',$$(tools/build release '$(PG_CONFIG)'))
version = $$(tools/version)
libdir = '$(DESTDIR)'"$$('$(PG_CONFIG)' --pkglibdir)"
extdir = '$(DESTDIR)'"$$('$(PG_CONFIG)' --sharedir)/extension"

.PHONY: all install uninstall deb dist installcheck setup private lint unit test test-15 test-16 test-18 demo bench clean

all:
	@tools/build release '$(PG_CONFIG)'

install:
	@set -e; package=$(package); tools/place "$$package" $(libdir) $(extdir); echo "awa_queue $(version) installed"

uninstall:
	rm -f $(libdir)/awa_queue.so $(extdir)/awa_queue.control $(extdir)/awa_queue--*.sql

deb:
	@set -e; package=$(package); tools/deb "$$package" '$(PG_CONFIG)'

dist:
	@tools/dist

installcheck:
	@tools/installcheck '$(PG_CONFIG)'

setup:
	@tools/setup

private: setup
	@set -e; for major in 15 18; do for flavour in release injection; do tools/private $$major $$flavour; done; done; \
	tools/private 16 release

lint:
	@cargo fmt --check
	@tools/cargo 15 clippy --all-targets -- -D warnings

unit:
	@tools/cargo 15 test --lib

test:
	@tools/test

test-15 test-16 test-18:
	@tools/test $(@:test-%=%)

demo:
	@tools/setup --no-wheel
	@tools/with-15 demo/run

bench:
	@tools/setup
	@tools/with-15 bench/run

clean:
	@case "$$(cat target/pgroot 2>/dev/null)" in */awa_pg.*) rm -rf "$$(cat target/pgroot)" ;; esac
	rm -rf target

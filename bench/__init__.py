"""How fast the parts are, beside something else in the same run.

speed      make bench: the server, beside a relay or another server
relay      the least that a bus in Python can do
client     python3 -m bench.client: sbus_client.py, beside bare loops
attack     make attack: what one user's storms do to another user
pipeline   make bench-pipeline: beside DuckDB and an older version
harness    what they share
"""

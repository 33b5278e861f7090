"""How fast the parts are, beside something else in the same run.

speed      make bench: the server, beside a relay or another server
relay      the least that a bus in Python can do
link       python3 -m bench.link: beside a bridge, mosquitto and NATS
queue      python3 -m bench.queue: beside beanstalkd and Redis
attack     make attack: what one user's storms do to another user
harness    what they share
peers      what only the peers need: configurations, and loads in C
"""

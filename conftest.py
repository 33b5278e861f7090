"""What pytest reads first: the fixtures of all tests, those in tests/ too."""

pytest_plugins = ["bus_fixtures", "client_ends"]

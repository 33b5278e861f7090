"""How fast a server is, and what one user's storms do to another.

    speed     make bench: scenarios, each beside the relay in the same run
    relay     the least that a bus in Python can do
    client    what sbus_client costs beside bare loops
    attack    make attack: storms, and how long another user waits meanwhile

Of the repository, speed imports sbus and sbus_client, client sbus_client;
attack and relay nothing.
"""

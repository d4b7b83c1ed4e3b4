"""The side that clients talk to: the HTTP endpoint, the protocol of each era, and their streams."""

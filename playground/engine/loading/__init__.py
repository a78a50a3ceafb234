"""From files to a network in memory that computes what the library computes."""

"""Where the roles of a run live: on this host, or on Ray."""

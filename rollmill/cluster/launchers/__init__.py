"""Where the roles of a run live: on this host, or in a Ray cluster."""

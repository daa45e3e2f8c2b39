"""Everything between the streams and the sockets, the command line and the settings."""

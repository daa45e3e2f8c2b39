"""One Redis server, Sentinel or a cluster: what a URL leads to."""

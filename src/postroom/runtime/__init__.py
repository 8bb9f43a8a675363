"""The shells around the contracts that wait, listen and run: the harness's loops and its HTTP server."""

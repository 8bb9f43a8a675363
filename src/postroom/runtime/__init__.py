"""Servers and background processes around the contracts: harness, task server, mail server, shipper."""

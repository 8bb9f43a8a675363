"""The contracts, one module and one docs page each. A contract never imports another one."""

"""The contracts, one module and one docs page each."""

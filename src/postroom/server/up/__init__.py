"""`postroom up`: the supervised processes of a data folder, the traffic of its demo, and the load generator.

The commands start what is here. The data folder (`server/folder`) reads the states of the parts, and nothing
else here may import it.
"""

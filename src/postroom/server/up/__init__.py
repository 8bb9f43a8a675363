"""`postroom up`: the supervised processes of a data folder, the traffic of its demo, and the load generator.

The commands start what is here. Other rooms read only the states of the parts and the targets of a load.
"""

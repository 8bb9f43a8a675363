"""The gold layer: aggregates for operators, computed from silver tables."""

"""What operators ask for, summed up from silver tables."""
